"""`/v2`: the Open Inference Protocol, version 2, with extensions of NVIDIA Triton Inference Server.

Operations and registered layers are models.  A request is a JSON header, followed by the tensors in binary:

    bytes → InferenceHeader → InferenceRequest → HostTensor → NormJob → NormResult → bytes

The engine, the permits, the keys, the deadlines and the metrics are those of `/v1`.
"""
