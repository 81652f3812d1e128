"""Pipelines of logits processors, compiled to few kernels.

    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), Sample()])
    tokens = pipe(logits, temperature=0.7, top_k=50, top_p=0.9, seed=seeds)

A processor says what to do; `legalize_processors` chooses the operation that does it to the tensor
that arrives (logits or probabilities), and `compile_pipeline` joins neighbours that one kernel can
do. Parameters are given to the processor, or to the call.
"""

from .compiler import CompileError as CompileError
from .compiler import Compiler as Compiler
from .compiler import compile_pipeline as compile_pipeline
from .fusion_rules import FusionRule as FusionRule
from .legalization import LegalizationError as LegalizationError
from .legalization import legalize_processors as legalize_processors
from .op import Op as Op
from .op import ParameterizedOp as ParameterizedOp
from .pipeline import LogitsPipe as LogitsPipe
from .processors import LogitsProcessor as LogitsProcessor
from .processors import MinP as MinP
from .processors import Sample as Sample
from .processors import Softmax as Softmax
from .processors import Temperature as Temperature
from .processors import TopK as TopK
from .processors import TopP as TopP
from .types import TaggedTensor as TaggedTensor
from .types import TensorType as TensorType
