// The types of the driver that kernels take as parameters.
#pragma once

struct alignas(64) CUtensorMap_st {
  unsigned long opaque[16];
};
using CUtensorMap = CUtensorMap_st;
