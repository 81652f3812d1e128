// FlashInfer's name of variant.cuh, which variants written for it include.
#pragma once

#include <flashinfer/attention/variant.cuh>
