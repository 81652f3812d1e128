"""Timing, error bounds and test inputs, shared by the tests, the benchmarks and users.

Importing this package touches neither CUDA nor CUPTI.
"""

from .flops import attention_flops as attention_flops
from .flops import attention_flops_with_actual_seq_lens as attention_flops_with_actual_seq_lens
from .flops import attention_tb_per_sec as attention_tb_per_sec
from .flops import (
    attention_tb_per_sec_with_actual_seq_lens as attention_tb_per_sec_with_actual_seq_lens,
)
from .flops import attention_tflops_per_sec as attention_tflops_per_sec
from .flops import (
    attention_tflops_per_sec_with_actual_seq_lens as attention_tflops_per_sec_with_actual_seq_lens,
)
from .numerics import Comparison as Comparison
from .numerics import ErrorBound as ErrorBound
from .numerics import compare as compare
from .numerics import error_bound as error_bound
from .numerics import unit_roundoff as unit_roundoff
from .reference import CheckOptions as CheckOptions
from .reference import assert_matches_reference as assert_matches_reference
from .reference import check_against as check_against
from .roofline import copy_bandwidth_tb_per_sec as copy_bandwidth_tb_per_sec
from .tensors import clone_arguments as clone_arguments
from .tensors import make_tensor as make_tensor
from .tensors import poisoned_allocations as poisoned_allocations
from .tensors import poisoned_like as poisoned_like
from .tensors import sprinkle_special_values as sprinkle_special_values
from .timing import bench_gpu_time as bench_gpu_time
from .timing import bench_gpu_time_with_cuda_event as bench_gpu_time_with_cuda_event
from .timing import bench_gpu_time_with_cudagraph as bench_gpu_time_with_cudagraph
from .timing import bench_gpu_time_with_cupti as bench_gpu_time_with_cupti
from .timing import set_seed as set_seed
from .timing import sleep_after_kernel_run as sleep_after_kernel_run
