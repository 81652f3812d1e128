// Stands for users' variants in host parts: which members a variant adds is said at run time.
//
// Each member, a pointer or a scalar, has a slot of 8 bytes, in the order in which run() takes
// them. attention_variant_params.h.jinja renders the same layout for the kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <flashinfer/attention/attention_params.h>
#include <string>
#include <vector>

namespace flashinfer {

struct VariantMember {
  bool is_tensor;
  std::string type;  // a tensor's dtype as torch names it; a scalar's type in C++
  std::string name;
};

// attention_variant_members() sets them when Python loads the library for a variant.
inline std::vector<VariantMember>& variant_members() {
  static auto* const members = new std::vector<VariantMember>;
  return *members;
}

struct UserVariantParams : VariantParams {
  static constexpr int kSlots = 16;
  uint64_t slots[kSlots];

  template <typename Reader>
  void read(Reader& reader) {
    uint64_t* slot = slots;
    for (const VariantMember& member : variant_members()) {
      if (member.is_tensor) {
        void* data = nullptr;
        reader.tensor(member.name.c_str(), data, member.type.c_str());
        std::memcpy(slot, &data, sizeof(data));
      } else {
        read_scalar<float, double, bool, int, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t,
                    uint32_t, uint64_t>(
            reader, member, slot,
            {"float", "double", "bool", "int", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t",
             "uint16_t", "uint32_t", "uint64_t"});
      }
      ++slot;
    }
  }

 private:
  template <typename... Types, typename Reader>
  static void read_scalar(Reader& reader, const VariantMember& member, uint64_t* slot,
                          const char* const (&names)[sizeof...(Types)]) {
    int i = 0;
    (read_if<Types>(member.type == names[i++], reader, member, slot), ...);
  }

  template <typename T, typename Reader>
  static void read_if(bool is_type, Reader& reader, const VariantMember& member, uint64_t* slot) {
    if (!is_type) return;
    T value;
    reader.scalar(member.name.c_str(), value);
    std::memcpy(slot, &value, sizeof(value));
  }
};

}  // namespace flashinfer
