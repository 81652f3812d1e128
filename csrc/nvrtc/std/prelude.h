// Included before every program: what nvcc's host headers define and NVRTC lacks.
#pragma once

#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define __builtin_huge_valf() INFINITY
#define __builtin_nanf(tag) __builtin_bit_cast(float, 0x7fc00000)
