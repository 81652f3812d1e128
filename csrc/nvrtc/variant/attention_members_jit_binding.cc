//   attention_variant_members(text)
//
// Says what run() takes after its own arguments. `text` is uint8 on the CPU, a line for each
// member: "tensor float32 sink", "scalar double sm_scale".
#include "attention_variant_params.h"
#include "ffi.h"

using namespace flashinfer;

FLASHINFER_FFI_EXPORT(attention_variant_members, args) {
  const ffi::Tensor text = args.tensor("text");
  args.all_taken();
  const std::string lines(static_cast<const char*>(text.data()), static_cast<size_t>(text.numel()));
  std::vector<VariantMember> members;
  for (size_t begin = 0, end; (end = lines.find('\n', begin)) != lines.npos; begin = end + 1) {
    const size_t first = lines.find(' ', begin), second = lines.find(' ', first + 1);
    if (second >= end || members.size() == UserVariantParams::kSlots) {
      ffi::raise("ValueError", "`text` has a bad line, or more than %d", UserVariantParams::kSlots);
    }
    members.push_back({lines.compare(begin, first - begin, "tensor") == 0,
                       lines.substr(first + 1, second - first - 1),
                       lines.substr(second + 1, end - second - 1)});
  }
  variant_members() = members;
}
