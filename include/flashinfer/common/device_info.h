// Facts about a device that launches depend on. Plain C++.
#pragma once

namespace flashinfer {

struct DeviceInfo {
  int num_sms = 0;
  int compute_capability = 0;  // 90 for 9.0

  bool has_clusters() const { return compute_capability >= 90; }
  bool has_pdl() const { return compute_capability >= 90; }
  bool has_copy_engine() const { return compute_capability >= 90; }
};

}  // namespace flashinfer
