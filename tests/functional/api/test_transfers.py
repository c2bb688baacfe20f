"""Tokens, uploads and downloads: each right is for one object, and no answer redirects a client."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from baton.contract.objects.dataset_manifest import DATASET_MANIFEST
from functions.api.objects.transfers import MAX_ANSWERED_BYTES
from functions.storage.s3.crc64 import crc64nvme
from tests.kits.api.harness import NO_JOB, TENANT, Answer, Api, quoted
from tests.kits.files.declared_files import described

DATA = "training-data"
CHECKPOINTS = "training-checkpoints"

KEYS = [
    "timber/IMG_1.jpg",
    "a:b::c",
    "with space/and  two",
    "ünï/çödé/日本語/🦜.png",
    "a+b=c&d;e,f",
    "100%/50%25/%2F/%zz",
    "what?.png",
    "#hash/~tilde/'quote'\"",
    "a..b/...c/.hidden",
    "k" * 900,
    "é" * 450,
]
BAD_KEYS = ["", "/", "a//b", "a/", "..", "a/../b", "./a", "a\\b", "a\nb", "a\0", "k" * 901, "k" * 1024, "é" * 451]


def token(api: Api, kind: str, key: str, bucket: str = DATA, /, **more: Any) -> str:
    answer = api.get(f"/{kind}/token", query={"bucket": bucket, "key": key}, **more).ok()
    return str(answer["token"])


def download(api: Api, key: str, said: str | None, bucket: str = DATA, /, **more: Any) -> Answer:
    headers = {"x-download-token": said} if said is not None else {}
    return api.get(f"/download/{bucket}/{quoted(key)}", headers=headers, **more)


def upload(
    api: Api, method: str, key: str, said: str | None, /, query: str = "", body: Any = None, **more: Any
) -> Answer:
    headers = {"x-upload-token": said} if said is not None else {}
    bucket = more.pop("bucket", DATA)
    return api.call(method, f"/upload/{bucket}/{quoted(key)}{query}", body, headers=headers, **more)


def multipart(api: Api, key: str, said: str, *parts: bytes, bucket: str = DATA) -> Answer:
    """The original's upload; the answer to its last call."""
    made = upload(api, "POST", key, said, "?action=mpu-create", bucket=bucket).ok()
    assert made["key"] == key
    listed = []
    for number, data in enumerate(parts, start=1):
        query = f"?action=mpu-uploadpart&uploadId={made['uploadId']}&partNumber={number}"
        put = upload(api, "PUT", key, said, query, data, bucket=bucket)
        listed.append(put.ok())
        assert listed[-1]["partNumber"] == number
    query = f"?action=mpu-complete&uploadId={made['uploadId']}"
    return upload(api, "POST", key, said, query, {"parts": listed}, bucket=bucket)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key[:20]))
def test_every_name_goes_up_and_comes_down(api: Api, key: str) -> None:
    done = multipart(api, key, token(api, "upload", key), b"one ", b"two")
    assert done.ok() == {"status": "ok"} and done.headers["etag"].endswith('-2"')
    assert api.objects(DATA) == {key: b"one two"}
    (listed,) = api.get("/data").ok()["objects"]
    assert (listed["key"], listed["size_bytes"]) == (key, 7)
    got = download(api, key, token(api, "download", key))
    assert got.status == 200 and got.body == b"one two" and got.headers["etag"] == done.headers["etag"]
    url = download(api, key, token(api, "download", key), query={"as": "url"}).ok()["url"]
    assert api.send("GET", url).text == "one two"
    assert upload(api, "DELETE", key, token(api, "upload", key), "?action=delete").ok(204) is None
    assert api.objects(DATA) == {}


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: ascii(key[:12]) + str(len(key)))
def test_names_that_cannot_be_used(api: Api, key: str) -> None:
    file = {name: described("a", b"")[name] for name in ("size_bytes", "crc64nvme")}
    with api.unchanged():
        for kind in ("download", "upload"):
            answer = api.get(f"/{kind}/token", query={"bucket": DATA, "key": key})
            answer.refused(ErrorCode.INVALID_KEY, "key")
        batch = {"bucket": DATA, "files": [file | {"key": "fine"}, file | {"key": key}]}
        api.post("/uploads", batch).refused(ErrorCode.INVALID_KEY, "files.1.key")
        if key not in ("", "/"):
            path = api.get(f"/download/{DATA}/{quoted(key)}", headers={"x-download-token": "t" * 43})
            path.refused(ErrorCode.INVALID_KEY, "key")


def test_a_download_token_is_good_once(api: Api) -> None:
    api.put_object(DATA, "a")
    said = token(api, "download", "a")
    assert download(api, "a", said).body == b"x"
    with api.unchanged():
        for _ in range(2):
            download(api, "a", said).refused(ErrorCode.TOKEN_INVALID, "x-download-token")


def test_a_token_for_another_object_is_refused_and_not_used_up(api: Api) -> None:
    api.put_object(DATA, "a")
    api.put_object(DATA, "b")
    api.put_object(CHECKPOINTS, "a")
    said = token(api, "download", "a")
    with api.unchanged():
        download(api, "b", said).refused(ErrorCode.TOKEN_WRONG_KEY, "x-download-token")
        download(api, "a", said, CHECKPOINTS).refused(ErrorCode.TOKEN_WRONG_KEY, "x-download-token")
        download(api, "a", said, key="rival_submit").refused(ErrorCode.TOKEN_WRONG_KEY, "x-download-token")
        download(api, "a", None).refused(ErrorCode.TOKEN_INVALID, "x-download-token")
        download(api, "a", "x" * 43).refused(ErrorCode.TOKEN_INVALID, "x-download-token")
    assert download(api, "a", said).body == b"x"


def test_tokens_expire(api: Api) -> None:
    api.put_object(DATA, "a")
    down, up = token(api, "download", "a"), token(api, "upload", "a")
    api.clock.advance(300)
    with api.unchanged():
        download(api, "a", down).refused(ErrorCode.TOKEN_INVALID, "x-download-token")
    made = upload(api, "POST", "a", up, "?action=mpu-create").ok()["uploadId"]
    assert upload(api, "PUT", "a", up, f"?uploadId={made}&partNumber=1", b"x").status == 200
    api.clock.advance(600)
    with api.unchanged():
        upload(api, "PUT", "a", up).refused(ErrorCode.TOKEN_INVALID, "x-upload-token")


def test_a_token_is_for_one_direction(api: Api) -> None:
    api.put_object(DATA, "a")
    down, up = token(api, "download", "a"), token(api, "upload", "a")
    with api.unchanged():
        download(api, "a", up).refused(ErrorCode.TOKEN_INVALID, "x-download-token")
        upload(api, "PUT", "a", down).refused(ErrorCode.TOKEN_INVALID, "x-upload-token")


@pytest.mark.parametrize(
    ("method", "query"),
    [("POST", "?action=mpu-create"), ("PUT", ""), ("DELETE", "?action=delete"), ("POST", "?action=mpu-complete")],
)
def test_an_upload_needs_the_token_for_that_object(api: Api, method: str, query: str) -> None:
    api.put_object(DATA, "a")
    said = token(api, "upload", "b")
    with api.unchanged():
        upload(api, method, "a", None, query).refused(ErrorCode.TOKEN_INVALID, "x-upload-token")
        upload(api, method, "a", "x" * 43, query).refused(ErrorCode.TOKEN_INVALID, "x-upload-token")
        upload(api, method, "a", said, query).refused(ErrorCode.TOKEN_WRONG_KEY, "x-upload-token")
        upload(api, method, "b", said, query, key="rival_submit").refused(ErrorCode.TOKEN_WRONG_KEY, "x-upload-token")
        upload(api, method, "b", said, query, bucket=CHECKPOINTS).refused(ErrorCode.TOKEN_WRONG_KEY, "x-upload-token")


def test_the_token_of_a_download_has_the_checksum_of_its_object(api: Api) -> None:
    """A page in a browser compares its bytes with the checksum before it saves them."""
    signed = api.context.objects.presign_put(TENANT, DATA, "a", expires_s=60, crc64nvme=crc64nvme(b"bytes"))
    assert api.send("PUT", signed.url, signed.headers, b"bytes").status == 200
    answer = api.get("/download/token", query={"bucket": DATA, "key": "a"}).ok()
    assert answer["crc64nvme"] == crc64nvme(b"bytes")
    assert api.get("/upload/token", query={"bucket": DATA, "key": "a"}).ok()["crc64nvme"] is None


def test_a_bucket_that_is_none(api: Api) -> None:
    with api.unchanged():
        for kind in ("download", "upload"):
            answer = api.get(f"/{kind}/token", query={"bucket": "elsewhere", "key": "a"})
            answer.refused(ErrorCode.UNKNOWN_BUCKET, "bucket")
        api.get("/download/elsewhere/a", headers={"x-download-token": "t"}).refused(ErrorCode.UNKNOWN_BUCKET, "bucket")
        api.call("PUT", "/upload/elsewhere/a").refused(ErrorCode.UNKNOWN_BUCKET, "bucket")
        api.get("/data", query={"bucket": "elsewhere"}).refused(ErrorCode.UNKNOWN_BUCKET, "bucket")
        api.get("/download/token", query={"bucket": DATA, "key": "no"}).refused(ErrorCode.OBJECT_NOT_FOUND, "key")
        api.get("/download/token", query={"bucket": DATA}).refused(ErrorCode.MISSING_FIELD, "key")


def test_a_multipart_upload_that_is_not_there(api: Api) -> None:
    said = token(api, "upload", "a")
    made = upload(api, "POST", "a", said, "?action=mpu-create").ok()["uploadId"]
    with api.unchanged():
        for query in ("?action=mpu-complete&uploadId=nothing", "?action=mpu-complete&uploadId=%C3%BC"):
            upload(api, "POST", "a", said, query, {"parts": []}).refused(ErrorCode.UPLOAD_NOT_FOUND, "uploadId")
        upload(api, "DELETE", "a", said, "?action=mpu-abort&uploadId=x").refused(ErrorCode.UPLOAD_NOT_FOUND, "uploadId")
        upload(api, "POST", "a", said, "?action=mpu-complete").refused(ErrorCode.MISSING_FIELD, "uploadId")
        upload(api, "DELETE", "a", said, "?action=mpu-abort").refused(ErrorCode.MISSING_FIELD, "uploadId")
        upload(api, "PUT", "a", said, "?action=mpu-uploadpart").refused(ErrorCode.MISSING_FIELD, "uploadId")
        upload(api, "PUT", "a", said, f"?uploadId={made}").refused(ErrorCode.MISSING_FIELD, "partNumber")
        upload(api, "POST", "a", said).refused(ErrorCode.INVALID_VALUE, "action")
        upload(api, "DELETE", "a", said).refused(ErrorCode.INVALID_VALUE, "action")
        upload(api, "PUT", "a", said, "?action=delete").refused(ErrorCode.INVALID_VALUE, "action")
        for parts in ([], [{"etag": "0" * 32, "partNumber": 1}], [{"etag": "x", "partNumber": 2}] * 2):
            query = f"?action=mpu-complete&uploadId={made}"
            upload(api, "POST", "a", said, query, {"parts": parts}).refused(ErrorCode.INVALID_VALUE, "parts")
    assert upload(api, "DELETE", "a", said, f"?action=mpu-abort&uploadId={made}").ok(204) is None
    upload(api, "POST", "a", said, f"?action=mpu-complete&uploadId={made}").refused(
        ErrorCode.UPLOAD_NOT_FOUND, "uploadId"
    )
    assert api.objects(DATA) == {}


def test_a_completed_upload_completes_again(api: Api) -> None:
    """A completion that repeats with the same parts succeeds again; one with other parts is refused."""
    said = token(api, "upload", "a")
    made = upload(api, "POST", "a", said, "?action=mpu-create").ok()["uploadId"]
    body = {"parts": [upload(api, "PUT", "a", said, f"?uploadId={made}&partNumber=1", b"x").ok()]}
    query = f"?action=mpu-complete&uploadId={made}"
    first = upload(api, "POST", "a", said, query, body)
    with api.unchanged():
        again = upload(api, "POST", "a", said, query, body)
        assert again.ok() == {"status": "ok"} and again.headers["etag"] == first.headers["etag"]
        for parts in ([], [{"etag": "0" * 32, "partNumber": 1}], [{"etag": "odd", "partNumber": 1}]):
            upload(api, "POST", "a", said, query, {"parts": parts}).refused(ErrorCode.UPLOAD_NOT_FOUND, "uploadId")


def test_a_part_goes_up_by_a_presigned_url(api: Api) -> None:
    said = token(api, "upload", "a")
    made = upload(api, "POST", "a", said, "?action=mpu-create").ok()["uploadId"]
    query = f"?action=mpu-presign&uploadId={made}&partNumber=1"
    signed = upload(api, "POST", "a", said, query).ok()
    assert signed["expires_at"] > api.clock.now()
    etag = api.send("PUT", signed["url"], {}, b"\xff" * 10).headers["etag"]
    body = {"parts": [{"etag": etag, "partNumber": 1}]}
    upload(api, "POST", "a", said, f"?action=mpu-complete&uploadId={made}", body).ok()
    assert api.objects(DATA) == {"a": b"\xff" * 10}


def test_a_part_of_any_content_type_is_stored_byte_by_byte(api: Api) -> None:
    """The gateway hands text over as text and everything else in base64."""
    said = token(api, "upload", "a")
    made = upload(api, "POST", "a", said, "?action=mpu-create").ok()["uploadId"]
    headers = {"x-upload-token": said, "content-type": "application/octet-stream"}
    target = f"/upload/{DATA}/a?uploadId={made}&partNumber=1"
    body = {"parts": [api.call("PUT", target, bytes(range(256)), headers=headers).ok()]}
    upload(api, "POST", "a", said, f"?action=mpu-complete&uploadId={made}", body).ok()
    assert download(api, "a", token(api, "download", "a")).body == bytes(range(256))


def test_a_part_without_bytes_is_refused(api: Api) -> None:
    said = token(api, "upload", "a")
    made = upload(api, "POST", "a", said, "?action=mpu-create").ok()["uploadId"]
    with api.unchanged():
        query = f"?uploadId={made}&partNumber=1"
        upload(api, "PUT", "a", said, query).refused(ErrorCode.MISSING_FIELD, "body")
        upload(api, "PUT", "a", said, "").refused(ErrorCode.MISSING_FIELD, "uploadId")
        upload(api, "PUT", "a", said, "?uploadId=x&partNumber=1", b"x").refused(ErrorCode.UPLOAD_NOT_FOUND, "uploadId")


def test_an_object_beyond_an_answer_has_a_url_and_keeps_its_token(api: Api) -> None:
    """4,500,000 bytes are 6 MB in base64, the most that a function may answer."""
    api.put_object(DATA, "fits", b"x" * MAX_ANSWERED_BYTES)
    api.put_object(DATA, "large", b"x" * (MAX_ANSWERED_BYTES + 1))
    assert len(download(api, "fits", token(api, "download", "fits")).body) == MAX_ANSWERED_BYTES
    said = token(api, "download", "large")
    with api.unchanged():
        download(api, "large", said).refused(ErrorCode.OBJECT_TOO_LARGE, "key")
    url = download(api, "large", said, query={"as": "url"}).ok()["url"]
    assert len(api.send("GET", url).text) == MAX_ANSWERED_BYTES + 1


def test_a_download_that_fails_keeps_its_token(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.put_object(DATA, "a")
    said = token(api, "download", "a")
    with monkeypatch.context() as away:
        away.setattr(api.context.objects, "read", lambda *_: 1 / 0)
        assert download(api, "a", said).status == 500
    assert download(api, "a", said).body == b"x"


@pytest.mark.parametrize(
    "place", [*[f"jobs/{{}}/{one}/x" for one in ("manifests", "artifacts", "logs", "curves")], "packs/x"]
)
def test_what_a_job_committed_cannot_be_uploaded_over(api: Api, place: str) -> None:
    api.submit()
    held = api.claim()
    name = place.format(held.id)
    with api.unchanged():
        for key in ("submit", "worker"):
            query = {"bucket": CHECKPOINTS, "key": name}
            api.get("/upload/token", query=query, key=key).refused(ErrorCode.INVALID_KEY, "key")
        file = {name: described("a", b"")[name] for name in ("size_bytes", "crc64nvme")}
        batch = {"bucket": CHECKPOINTS, "files": [file | {"key": name}]}
        api.post("/uploads", batch).refused(ErrorCode.INVALID_KEY, "key")


def test_a_worker_uploads_below_running_jobs_of_its_tenant_only(api: Api) -> None:
    api.submit()
    held = api.claim()
    waiting = api.submit()["id"]

    def ask(job_id: str, key: str) -> Answer:
        return api.get("/upload/token", query={"bucket": CHECKPOINTS, "key": f"jobs/{job_id}/a.zip"}, key=key)

    ask(held.id, "worker").ok()
    with api.unchanged():
        ask(held.id, "rival_worker").refused(ErrorCode.JOB_NOT_FOUND, "key")
        ask(NO_JOB, "worker").refused(ErrorCode.JOB_NOT_FOUND, "key")
        ask(waiting, "worker").refused(ErrorCode.LEASE_EXPIRED)
    api.post(f"/job/{held.id}/stop").ok()
    with api.unchanged():
        ask(held.id, "worker").refused(ErrorCode.JOB_CANCELED)


def test_an_upload_token_ends_with_the_job(api: Api) -> None:
    api.submit()
    held = api.claim()
    key = f"jobs/{held.id}/a.zip"
    said = token(api, "upload", key, CHECKPOINTS, key="worker")
    api.post(f"/job/{held.id}/stop").ok()
    with api.unchanged():
        target = f"/upload/{CHECKPOINTS}/{key}?action=mpu-create"
        api.post(target, headers={"x-upload-token": said}, key="worker").refused(ErrorCode.JOB_CANCELED)


def test_a_batch_of_presigned_uploads(api: Api) -> None:
    files = {f"digits/{n}.png": b"%d" % n for n in range(3)}
    wanted = [
        {k: v for k, v in {**described(key, data), "key": key}.items() if k not in ("path", "blake3")}
        for key, data in files.items()
    ]
    answer = api.post("/uploads", {"bucket": DATA, "files": wanted}).ok()
    for target in answer["uploads"]:
        assert api.send("PUT", target["url"], target["headers"], b"!").status == 400, "S3 refuses other bytes"
        assert api.send("PUT", target["url"], target["headers"], files[target["key"]]).status == 200
    assert api.objects(DATA) == files
    assert api.objects(DATA, tenant="rival") == {}
    listed = api.get("/data", query={"prefix": "digits/", "limit": 2}).ok()
    assert [item["key"] for item in listed["objects"]] == ["digits/0.png", "digits/1.png"]


def test_a_job_s_inputs_have_paths_and_urls(api: Api) -> None:
    for key in ("digits/0/a.png", "digits/1/b.png", "digitsmore/c.png", "other/d"):
        api.put_object(DATA, key, key.encode())
    api.submit(inputs=[{"prefix": "digits/", "into": "train"}, {"prefix": "digits"}, {"prefix": "nothing/"}])
    held = api.claim()
    found: list[tuple[str, str]] = []
    cursor = None
    while True:
        query = {"cursor": cursor} if cursor else None
        page = api.get(f"/job/{held.id}/inputs", headers=held.headers, query=query).ok()
        for item in page["inputs"]:
            assert api.send("GET", item["url"]).text == item["key"]
            found.append((item["key"], item["path"]))
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == [
        ("digits/0/a.png", "train/0/a.png"),
        ("digits/1/b.png", "train/1/b.png"),
        ("digits/0/a.png", "digits/0/a.png"),
        ("digits/1/b.png", "digits/1/b.png"),
        ("digitsmore/c.png", "digitsmore/c.png"),
    ]


def test_an_input_that_is_a_part_of_pushed_folders_comes_with_their_manifests(api: Api) -> None:
    """The first page names the manifests around the input, outermost first; manifests below are inputs themselves."""
    for folder in ("sets/", "sets/dogs/", "sets/dogs/small/", "sets/cats/"):
        api.put_object(DATA, folder + DATASET_MANIFEST, folder.encode())
    for number in range(501):
        api.put_object(DATA, f"sets/dogs/small/{number:03}", b"x")
    api.submit(inputs=[{"prefix": "sets/dogs/small/"}, {"prefix": "sets/dogs/sm", "into": "again"}, {"prefix": "sets"}])
    held = api.claim()
    pages = []
    cursor = None
    while cursor is not None or not pages:
        query = {"cursor": cursor} if cursor else None
        pages.append(api.get(f"/job/{held.id}/inputs", headers=held.headers, query=query).ok())
        cursor = pages[-1]["next_cursor"]
    around = ["sets/" + DATASET_MANIFEST, "sets/dogs/" + DATASET_MANIFEST]
    assert [[found["key"] for found in page["manifests"]] for page in pages] == [around, [], around, [], [], []]
    for found in pages[0]["manifests"]:
        assert api.send("GET", found["url"]).text == found["key"].removesuffix(DATASET_MANIFEST)
    assert "sets/dogs/small/" + DATASET_MANIFEST in {found["key"] for found in pages[0]["inputs"]}


def test_one_key_with_both_scopes_does_everything(api: Api) -> None:
    both = api.issue(TENANT, Scope.SUBMIT, Scope.WORKER)
    api.put_object(DATA, "a")
    said = api.get("/download/token", query={"bucket": DATA, "key": "a"}, key=both).ok()["token"]
    assert download(api, "a", said, key=both).body == b"x"
