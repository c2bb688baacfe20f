"""Moving objects: one-time download tokens, upload tokens, and batches of presigned URLs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from baton.contract.base import AnswerModel, Crc64, EpochSeconds, KeyPrefix, ObjectKey, WireModel
from baton.contract.names import DATA_BUCKET
from baton.contract.objects.parts import LargeSizeBytes, Parts, require_fitting

BucketName = Annotated[str, Field(min_length=1, max_length=64, examples=["training-data"])]


class TokenQuery(WireModel):
    """Query of `GET /download/token` and `GET /upload/token`. Example: `?bucket=training-data&key=timber/1.jpg`"""

    bucket: BucketName
    key: ObjectKey


class TokenAnswer(AnswerModel):
    """Example: `{"token": "abcdefg", "expires_at": 1790000300}`"""

    token: str
    expires_at: EpochSeconds
    crc64nvme: str | None = None
    """For a download: the checksum of the object, if the store has one."""


class DownloadQuery(WireModel):
    """Query of `GET /download/{bucket}/{key+}`. Example: `?as=url`"""

    as_: Annotated[Literal["url"] | None, Field(alias="as")] = None
    """`url`: answer with a presigned URL instead of the bytes."""


class PresignedUrl(AnswerModel):
    """Example: `{"url": "https://...", "expires_at": 1790000900}`

    The URL alone is the right to one request. Send neither the API key nor a token to its host.
    """

    url: str
    expires_at: EpochSeconds


class UploadedPart(WireModel):
    """Part of a multipart upload, as `PUT /upload/...` answers.

    Example: `{"etag": "9b2c...", "partNumber": 1}`
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    etag: Annotated[str, Field(min_length=1, max_length=128)]
    partNumber: Annotated[int, Field(ge=1, le=10_000)]  # noqa: N815 - the original's spelling


class MultipartComplete(WireModel):
    """Body of `action=mpu-complete`. Example: `{"parts": [{"etag": "9b2c...", "partNumber": 1}]}`

    Parts may be left out: then those that S3 has are used.
    """

    parts: Annotated[list[UploadedPart], Field(max_length=10_000)] = []


class MultipartCreated(AnswerModel):
    """Example: `{"key": "timber/1.jpg", "uploadId": "..."}`"""

    key: str
    uploadId: str  # noqa: N815 - the original's spelling


class UploadFile(WireModel):
    """File of a batch. Example: `{"key": "digits/3/0001.png", "size_bytes": 301, "crc64nvme": "UvieJR3alJI="}`"""

    key: ObjectKey
    size_bytes: LargeSizeBytes
    crc64nvme: Crc64
    parts: Parts | None = None
    """Parts of a large file; None for a single PUT."""

    @model_validator(mode="after")
    def _parts_fit(self) -> UploadFile:
        require_fitting(self.parts, self.size_bytes)
        return self


class UploadBatch(WireModel):
    """Body of `POST /uploads`: presigned PUTs for many files at once.

    Files with `parts` have to be asked for again when their parts are stored: that makes an object of them.

    Example: `{"bucket": "training-data", "files": [{"key": "digits/3/0001.png", "size_bytes": 301,
    "crc64nvme": "UvieJR3alJI="}]}`
    """

    bucket: BucketName
    files: Annotated[list[UploadFile], Field(min_length=1, max_length=1000)]


class UploadTarget(AnswerModel):
    """Target of the PUT of one file, or of one part of a file; the headers must be sent exactly as given.

    Example: `{"key": "digits/3/0001.png", "url": "https://...", "headers": {"if-none-match": "*"}}`
    """

    key: str
    url: str
    headers: dict[str, str]
    part: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Number of the part, from 1; None for the whole file."""


class UploadTargets(AnswerModel):
    """Example: `{"uploads": [{"key": "digits/3/0001.png", "url": "https://...", "headers": {}}], ...}`

    A file whose parts were declared is named by neither list once it is stored as declared.
    """

    uploads: list[UploadTarget]
    expires_at: EpochSeconds
    pending: list[str] = []
    """Keys of files in parts that are not stored yet. `uploads` has URLs for some of them; request the rest again."""


class ObjectQuery(WireModel):
    """Query of `GET /data`. Example: `?bucket=training-data&prefix=digits/&limit=1000`"""

    bucket: BucketName = DATA_BUCKET
    prefix: KeyPrefix = ""
    cursor: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 1000


class ObjectView(AnswerModel):
    """Stored object. Example: `{"key": "digits/3/0001.png", "size_bytes": 301, "etag": "9b2c...", ...}`"""

    key: str
    size_bytes: int
    etag: str
    modified_at: EpochSeconds


class ObjectPage(AnswerModel):
    """Example: `{"objects": [], "next_cursor": null}`"""

    objects: list[ObjectView]
    next_cursor: str | None = None
