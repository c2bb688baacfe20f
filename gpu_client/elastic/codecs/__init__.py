"""Encode float32 values for the network."""

from __future__ import annotations

from gpu_client.elastic.codecs.block_codecs import Int4Codec, Int8Codec
from gpu_client.elastic.codecs.codec import Codec, check_finite
from gpu_client.elastic.codecs.plain_codecs import Bf16Codec, Fp32Codec

DEFAULT_CODEC = "int8"
CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32Codec(), Bf16Codec(), Int8Codec(), Int4Codec())}
"""Codecs by name. Any number of threads may use a codec at the same time."""

__all__ = ["CODECS", "DEFAULT_CODEC", "Codec", "check_finite"]
