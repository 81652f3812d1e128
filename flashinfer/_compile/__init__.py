"""Public functions as operators of ``torch.library``, for ``torch.compile``.

`traced` holds the stand-in that Dynamo traces in place of a decorated function. It names the
operator of the call, which `operators` registers, and whose results `outputs` predicts.
"""
