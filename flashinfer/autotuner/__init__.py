"""Choosing between implementations of an operation by measuring them.

An operation offers candidates: runners (implementations), each with its tactics (tile sizes, for
example). Inside ``with autotune():`` every call of the operation measures the candidates for the
sizes that it may meet, and keeps the fastest. Outside, a call looks the result up; a call without
a result takes the runner's own heuristic (tactic -1).
"""

from .arena import ValueProfileArena as ValueProfileArena
from .autotuner import AutoTuner as AutoTuner
from .candidates import is_in_profile_measurement as is_in_profile_measurement
from .context import autotune as autotune
from .measure import MeasurementPolicy as MeasurementPolicy
from .process_group import get_autotune_process_group as get_autotune_process_group
from .process_group import set_autotune_process_group as set_autotune_process_group
from .runner import TunableRunner as TunableRunner
from .specs import ConstraintSpec as ConstraintSpec
from .specs import DynamicDim as DynamicDim
from .specs import DynamicTensorSpec as DynamicTensorSpec
from .specs import OptimizationProfile as OptimizationProfile
from .specs import ProfilingCacheKey as ProfilingCacheKey
from .specs import StaticDim as StaticDim
from .specs import TuningConfig as TuningConfig
from .specs import autotuner_initializer_empty as autotuner_initializer_empty
from .specs import autotuner_initializer_ones as autotuner_initializer_ones
from .specs import autotuner_initializer_rand as autotuner_initializer_rand
from .specs import autotuner_initializer_rand_scaled as autotuner_initializer_rand_scaled
from .specs import autotuner_initializer_randn as autotuner_initializer_randn
from .specs import autotuner_initializer_zeros as autotuner_initializer_zeros
from .specs import make_bucket_mapper as make_bucket_mapper
from .specs import round_to_nearest_bucket as round_to_nearest_bucket
from .statistics import AutoTunerStatistics as AutoTunerStatistics
from .store import _collect_metadata as _collect_metadata
from .store import _json_to_tactic as _json_to_tactic
from .store import _tactic_to_json as _tactic_to_json
from .store import _tactic_to_json_hashable as _tactic_to_json_hashable
from .store import default_cache_path as default_cache_path
