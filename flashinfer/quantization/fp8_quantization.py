"""Names of 8-bit quantisation under the module that FlashInfer has them in."""

from . import mxfp8_dequantize_host as mxfp8_dequantize_host
from . import mxfp8_grouped_quantize as mxfp8_grouped_quantize
from . import mxfp8_quantize as mxfp8_quantize
from . import per_token_group_quant_8bit as per_token_group_quant_8bit
