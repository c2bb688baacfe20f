"""Rings for users and for the processes of jobs: records, URLs, lists, deletion, isolation of tenants."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, Scope, ring_token
from baton.contract.objects.rings import MAX_RECORD_BYTES
from functions.api.objects import rings
from functions.settings import ControlPlaneSettings
from functions.storage.s3.object_headers import EXPIRING_TAGGING
from tests.kits.api.harness import NOW, TENANT, Answer, Api, Held, memory_api

SETTINGS = b'{"cap": 10}'
ID = "0123456789abcdef"


@pytest.fixture
def api() -> Api:
    return memory_api()


def version(number: int) -> str:
    return f"{number:016x}"


def write(
    api: Api, record: str, data: bytes, number: int, seen: str | None = None, *, ring: str = "shapes", **more: Any
) -> Answer:
    """Write a record with the version of that number."""
    wanted = {"key": record, "data": base64.b64encode(data).decode(), "version": version(number)}
    body = {"write": wanted if seen is None else {**wanted, "seen": seen}, **more.pop("body", {})}
    return api.post(f"/rings/{ring}/records", body, **more)


def make(api: Api, ring: str = "shapes", ring_id: str = ID, **more: Any) -> Answer:
    body = {"write": {"key": "ring.json", "data": base64.b64encode(SETTINGS).decode(), "version": ring_id}}
    return api.post(f"/rings/{ring}/records", body, **more)


def read(api: Api, *keys: str, ring: str = "shapes", **more: Any) -> dict[str, tuple[bytes, str]]:
    found = api.post(f"/rings/{ring}/records", {"read": list(keys)}, **more).ok()["records"]
    return {one["key"]: (base64.b64decode(one["data"]), one["version"]) for one in found}


def put(api: Api, name: str, data: bytes, ring: str = "shapes", **more: Any) -> int:
    """Store an object by its URL: the status."""
    (target,) = api.post(f"/rings/{ring}/urls", {"put": [name]}, **more).ok()["put"]
    return api.send("PUT", target["url"], target["headers"], data).status


def running(api: Api, *names: str) -> tuple[Held, str]:
    """A job that names these rings, and the token that its processes get."""
    api.submit(rings=list(names))
    held = api.claim()
    return held, ring_token(held.id, held.token)


def test_a_ring_is_made_once_and_its_settings_stay(api: Api) -> None:
    assert read(api, "ring.json") == {}
    assert make(api).ok()["written"] is True
    assert make(api).ok()["written"] is True, "the same call, sent again"
    assert make(api, ring_id=version(7)).ok()["written"] is False
    assert write(api, "ring.json", b"{}", 8, ID).ok()["written"] is False
    assert read(api, "ring.json") == {"ring.json": (SETTINGS, ID)}
    view = {"name": "shapes", "id": ID, "created_at": NOW, "removing": False, "records": []}
    assert api.get("/rings").ok() == {"rings": [view], "next_cursor": None}


def test_who_made_a_ring_cannot_change_its_settings_or_bring_it_back(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a ring, which all its users know, permits neither new settings nor a ring after its deletion."""
    make(api)
    other = {"key": "ring.json", "data": base64.b64encode(b"{}").decode(), "version": ID}
    assert api.post("/rings/shapes/records", {"write": other}).ok()["written"] is True, "it is there already"
    assert read(api, "ring.json") == {"ring.json": (SETTINGS, ID)}
    put(api, "samples/w/1", b"x")
    put(api, "samples/w/2", b"x")
    monkeypatch.setattr(rings, "_OBJECTS_PER_CALL", 1)
    assert api.call("DELETE", "/rings/shapes").ok()["done"] is False
    make(api).refused(ErrorCode.RING_NOT_FOUND, "ring")
    api.post("/rings/shapes/records", {"read": ["pointer"]}).refused(ErrorCode.RING_NOT_FOUND, "ring")
    assert api.call("DELETE", "/rings/shapes").ok()["done"] is True


def test_a_record_is_written_over_what_was_seen_and_nothing_else(api: Api) -> None:
    make(api)
    assert write(api, "pointer", b"1", 1).ok()["written"] is True
    assert write(api, "pointer", b"other", 2).ok()["written"] is False
    assert write(api, "pointer", b"2", 3, version(1)).ok()["written"] is True
    assert write(api, "pointer", b"late", 4, version(1)).ok()["written"] is False
    assert write(api, "pointer", b"2", 3, version(1)).ok()["written"] is True, "the same call, sent again"
    assert read(api, "pointer", "publisher") == {"pointer": (b"2", version(3))}
    api.post("/rings/shapes/delete", {"keys": ["pointer", "publisher"]}).ok(204)
    assert read(api, "pointer") == {}
    assert write(api, "pointer", b"3", 5, version(3)).ok()["written"] is False


def test_what_is_read_with_a_write_is_as_it_is_behind_it(api: Api) -> None:
    make(api)
    write(api, "writers/w", b"lease", 1)
    answer = write(api, "inbox/w.1", b"", 2, body={"read": ["writers/w", "inbox/w.1"]}).ok()
    assert answer["written"] is True
    assert {one["key"]: one["version"] for one in answer["records"]} == {
        "writers/w": version(1),
        "inbox/w.1": version(2),
    }


def test_a_page_follows_records_by_key_and_prefix_and_asks_again_for_nothing_new(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(api)
    make(api, "other", version(5))
    write(api, "pointer", b"1", 1)
    for number in range(3):
        write(api, f"writers/w{number}", b"lease", 2 + number)
    query = {"keys": "pointer,publisher,ring.json", "prefixes": "writers/,readers/", "limit": 2}
    answer = api.get("/rings/shapes/records", query=query)
    found = answer.ok()
    assert [one["key"] for one in found["records"]] == ["pointer", "ring.json", "writers/w0", "writers/w1"]
    assert base64.b64decode(found["records"][0]["data"]) == b"1" and found["incomplete"] == ["writers/"]
    etag = {"if-none-match": answer.headers["etag"]}
    assert api.get("/rings/shapes/records", query=query, headers=etag).status == 304
    write(api, "pointer", b"2", 8, version(1))
    assert api.get("/rings/shapes/records", query=query, headers=etag).status == 200
    listed = api.get("/rings", query={"records": "ring.json,pointer"}).ok()["rings"]
    assert [(one["name"], [record["key"] for record in one["records"]]) for one in listed] == [
        ("other", ["ring.json"]),
        ("shapes", ["ring.json", "pointer"]),
    ]
    monkeypatch.setattr(rings, "MAX_RECORDS_BYTES", 10)
    found = api.get("/rings/shapes/records", query={"prefixes": "writers/"}).ok()
    assert ([one["key"] for one in found["records"]], found["incomplete"]) == (
        ["writers/w0"],
        ["writers/w1", "writers/w2"],
    )


def test_a_list_of_rings_with_large_records_is_a_shorter_page(api: Api) -> None:
    """Lambda answers at most 6 MB."""
    for number in range(12):
        make(api, f"ring-{number:02}", version(100 + number))
        write(api, "read", bytes(MAX_RECORD_BYTES), 1, ring=f"ring-{number:02}")
    pages: list[list[str]] = []
    query = {"records": "read"}
    while len(pages) < 12:
        answer = api.get("/rings", query=query)
        assert len(answer.text) < 6_000_000
        pages.append([one["name"] for one in answer.ok()["rings"]])
        if answer.json["next_cursor"] is None:
            break
        query = {"records": "read", "cursor": answer.json["next_cursor"]}
    assert len(pages) == 2
    assert [name for page in pages for name in page] == [f"ring-{number:02}" for number in range(12)]


def test_no_more_records_are_read_than_an_answer_has_room_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    make(api)
    for number in range(9):
        write(api, f"writers/w{number}", b"lease", number + 1)
    monkeypatch.setattr(rings, "_RECORDS_AT_ONCE", 3)
    monkeypatch.setattr(rings, "MAX_RECORDS_BYTES", 10)
    reads: list[int] = []
    store = api.context.rings
    assert store is not None
    read_all = store.read
    monkeypatch.setattr(store, "read", lambda ring, keys: (reads.append(len(keys)), read_all(ring, keys))[1])
    found = api.get("/rings/shapes/records", query={"prefixes": "writers/"}).ok()
    assert ([one["key"] for one in found["records"]], len(found["incomplete"]), reads) == (["writers/w0"], 8, [3])


def test_records_of_a_page_belong_to_its_own_rings(api: Api) -> None:
    make(api)
    write(api, "pointer", b"ours", 1)
    with api.unchanged():
        rival = api.get("/rings/shapes/records", query={"keys": "pointer"}, key="rival_submit")
        rival.refused(ErrorCode.RING_NOT_FOUND, "ring")
        for query in ({"keys": "samples/w/1"}, {"prefixes": "samples/"}, {"keys": "pointer,manifests/1"}):
            api.get("/rings/shapes/records", query=query).refused(ErrorCode.INVALID_KEY, "key")
        api.get("/rings", query={"records": "samples/w/1"}).refused(ErrorCode.INVALID_KEY, "key")
        for query in ({"keys": "a//b"}, {"keys": ","}, {"keys": ",".join("abcdefghijk")}):
            api.get("/rings/shapes/records", query=query).refused(ErrorCode.INVALID_VALUE, "keys")
        api.get("/rings/shapes/records", query={"prefixes": "writers"}).refused(ErrorCode.INVALID_VALUE, "prefixes")


def test_objects_are_stored_once_and_fetched_by_url(api: Api) -> None:
    make(api)
    assert put(api, "samples/w/1", b"bytes") == 200
    assert put(api, "samples/w/1", b"other") == 412
    answer = api.post("/rings/shapes/urls", {"get": ["samples/w/1", "samples/w/2"]}).ok()
    assert answer["life_s"] == api.context.settings.url_life_s
    found = [api.send("GET", one["url"]) for one in answer["get"]]
    assert [(one.status, one.text) for one in found] == [(200, "bytes"), (404, "NoSuchKey")]
    assert api.objects(DATA_BUCKET) == {f"rings/shapes/{ID}/samples/w/1": b"bytes"}


def test_samples_may_expire_where_the_bucket_is_told_so_and_manifests_never() -> None:
    api = memory_api(settings=ControlPlaneSettings(samples_expire=True))
    make(api)
    declared = {"key": "samples/w/2", "size_bytes": 1, "crc64nvme": "jC+ERbTL/Dw="}
    body = {"put": ["samples/w/1", "manifests/1"], "declared": [declared]}
    found = {one["key"]: one["headers"] for one in api.post("/rings/shapes/urls", body).ok()["put"]}
    assert {key: headers.get("x-amz-tagging") for key, headers in found.items()} == {
        "samples/w/1": EXPIRING_TAGGING,
        "samples/w/2": EXPIRING_TAGGING,
        "manifests/1": None,
    }
    assert put(api, "samples/w/1", b"bytes") == 200


def test_an_object_that_is_declared_is_stored_with_its_very_bytes_or_not_at_all(api: Api) -> None:
    make(api)
    declared = {"key": "samples/w/1", "size_bytes": 1, "crc64nvme": "jC+ERbTL/Dw="}  # of b"a"
    (target,) = api.post("/rings/shapes/urls", {"declared": [declared]}).ok()["put"]
    assert target["key"] == "samples/w/1"
    for wrong in (b"b", b"aa", b""):
        headers = {**target["headers"], "content-length": str(len(wrong))}
        assert api.send("PUT", target["url"], headers, wrong).status in (400, 403)
    assert api.objects(DATA_BUCKET) == {}
    assert api.send("PUT", target["url"], target["headers"], b"a").status == 200
    assert api.send("PUT", target["url"], target["headers"], b"a").status == 412
    assert api.objects(DATA_BUCKET) == {f"rings/shapes/{ID}/samples/w/1": b"a"}
    record = {"declared": [{**declared, "key": "inbox/w.1"}]}
    api.post("/rings/shapes/urls", record).refused(ErrorCode.INVALID_KEY, "key")
    huge = {"declared": [{**declared, "size_bytes": 10**15}]}
    assert api.post("/rings/shapes/urls", huge).status == 422


def test_keys_are_listed_in_order_page_by_page(api: Api) -> None:
    make(api)
    wanted = [f"inbox/w.{number}" for number in range(7)]
    for number, key in enumerate(reversed(wanted)):
        write(api, key, b"", number)
    write(api, "inboxes/w", b"", 100)
    for number in range(3):
        put(api, f"samples/w/{number}", b"x")
    for prefix, expected in (("inbox/", wanted), ("samples/", [f"samples/w/{number}" for number in range(3)])):
        found: list[str] = []
        query: dict[str, Any] = {"prefix": prefix, "limit": 2}
        while True:
            page = api.get("/rings/shapes/keys", query=query).ok()
            found += page["keys"]
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        assert found == expected
    other = api.get("/rings/shapes/keys", query={"prefix": "inbox/", "limit": 2}).ok()["next_cursor"]
    wrong = {"prefix": "samples/", "cursor": other}
    api.get("/rings/shapes/keys", query=wrong).refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_tenants_cannot_see_each_others_rings(api: Api) -> None:
    make(api)
    write(api, "pointer", b"ours", 1)
    put(api, "samples/w/1", b"ours")
    with api.unchanged():
        assert api.get("/rings", key="rival_submit").ok()["rings"] == []
        for body in ({"read": ["pointer"]}, {"write": {"key": "pointer", "data": "", "version": version(2)}}):
            api.post("/rings/shapes/records", body, key="rival_submit").refused(ErrorCode.RING_NOT_FOUND, "ring")
        urls = api.post("/rings/shapes/urls", {"get": ["samples/w/1"]}, key="rival_submit")
        urls.refused(ErrorCode.RING_NOT_FOUND, "ring")
        keys = api.get("/rings/shapes/keys", query={"prefix": "samples/"}, key="rival_submit")
        keys.refused(ErrorCode.RING_NOT_FOUND, "ring")
        gone = api.post("/rings/shapes/delete", {"keys": ["pointer"]}, key="rival_submit")
        gone.refused(ErrorCode.RING_NOT_FOUND, "ring")
        api.call("DELETE", "/rings/shapes", key="rival_submit").refused(ErrorCode.RING_NOT_FOUND, "ring")
    # One of their own, of the same name, is another ring.
    assert make(api, key="rival_submit", ring_id=version(9)).ok()["written"] is True
    assert read(api, "pointer", key="rival_submit") == {}
    assert read(api, "pointer") == {"pointer": (b"ours", version(1))}


def test_what_is_no_ring_or_no_key_is_refused_and_loses_nothing(api: Api) -> None:
    make(api)
    with api.unchanged():
        api.get("/rings/NoRing/keys", query={"prefix": "inbox/"}).refused(ErrorCode.RING_NOT_FOUND, "ring")
        api.get("/rings/none/keys", query={"prefix": "inbox/"}).refused(ErrorCode.RING_NOT_FOUND, "ring")
        for key in ("samples/w/1", "manifests/1"):
            write(api, key, b"", 1).refused(ErrorCode.INVALID_KEY, "key")
            api.post("/rings/shapes/records", {"read": [key]}).refused(ErrorCode.INVALID_KEY, "key")
        api.post("/rings/shapes/urls", {"put": ["inbox/w"]}).refused(ErrorCode.INVALID_KEY, "key")
        api.post("/rings/shapes/delete", {"keys": ["ring.json"]}).refused(ErrorCode.INVALID_KEY, "keys")
        for key in ("../other", "inbox//w", "inbox/.", "/inbox", "a b", ""):
            body = {"read": [key]}
            api.post("/rings/shapes/records", body).refused(ErrorCode.INVALID_VALUE, "read.0")
        api.get("/rings/shapes/keys", query={"prefix": "inbox"}).refused(ErrorCode.INVALID_VALUE, "prefix")
        bad = {"write": {"key": "pointer", "data": "no base64!", "version": version(1)}}
        api.post("/rings/shapes/records", bad).refused(ErrorCode.INVALID_VALUE, "write.data")
        large = write(api, "pins/train", b"x" * (MAX_RECORD_BYTES + 1), 1)
        said = large.refused(ErrorCode.PAYLOAD_TOO_LARGE, "write.data")["message"]
        assert f"pins/train has {MAX_RECORD_BYTES + 1} bytes; a record may have at most {MAX_RECORD_BYTES}" in said
    assert write(api, "pins/train", b"x" * MAX_RECORD_BYTES, 1).ok()["written"] is True


def test_a_ring_is_removed_with_all_that_is_in_it(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    make(api)
    make(api, "other", version(5))
    for number in range(5):
        write(api, f"inbox/w.{number}", b"", number)
        put(api, f"samples/w/{number}", b"x")
        write(api, f"inbox/w.{number}", b"", number, ring="other")
    monkeypatch.setattr(rings, "_OBJECTS_PER_CALL", 2)
    first = api.call("DELETE", "/rings/shapes").ok()
    assert first == {"removed": 7, "done": False}
    # From now on nobody is let in, and nobody makes it anew before it is gone.
    api.post("/rings/shapes/records", {"read": ["pointer"]}).refused(ErrorCode.RING_NOT_FOUND, "ring")
    make(api, ring_id=version(6)).refused(ErrorCode.RING_NOT_FOUND, "ring")
    assert [ring["removing"] for ring in api.get("/rings").ok()["rings"]] == [False, True]
    removed = first["removed"]
    while not (answer := api.call("DELETE", "/rings/shapes").ok())["done"]:
        removed += answer["removed"]
    assert removed + answer["removed"] == 10
    assert [ring["name"] for ring in api.get("/rings").ok()["rings"]] == ["other"]
    assert api.objects(DATA_BUCKET) == {}
    api.call("DELETE", "/rings/shapes").refused(ErrorCode.RING_NOT_FOUND, "ring")
    assert api.get("/rings/other/keys", query={"prefix": "inbox/"}).ok()["keys"]


def test_who_used_a_ring_that_was_removed_does_not_get_into_the_next_of_its_name(api: Api) -> None:
    make(api)
    (late,) = api.post("/rings/shapes/urls", {"put": ["samples/w/1"]}).ok()["put"]
    assert api.call("DELETE", "/rings/shapes").ok()["done"] is True
    make(api, ring_id=version(2))
    claim = write(api, "inbox/w.1", b"", 3, body={"of": ID})
    claim.refused(ErrorCode.RING_NOT_FOUND, "ring")
    api.post("/rings/shapes/urls", {"of": ID, "put": ["samples/w/2"]}).refused(ErrorCode.RING_NOT_FOUND, "ring")
    api.post("/rings/shapes/delete", {"of": ID, "keys": ["pointer"]}).refused(ErrorCode.RING_NOT_FOUND, "ring")
    keys = {"prefix": "samples/", "of": ID}
    api.get("/rings/shapes/keys", query=keys).refused(ErrorCode.RING_NOT_FOUND, "ring")
    assert api.send("PUT", late["url"], late["headers"], b"x").status == 200
    assert api.get("/rings/shapes/keys", query={"prefix": "samples/"}).ok()["keys"] == []
    assert api.get("/rings/shapes/keys", query={"prefix": "inbox/", "of": version(2)}).ok()["keys"] == []


# Access


def test_a_job_that_names_a_ring_opens_it_and_no_other(api: Api) -> None:
    make(api)
    make(api, "other", version(1))
    held, token = running(api, "shapes", "mine", "shapes")
    assert held.item["rings"] == ["shapes", "mine"] == api.job(held.id)["rings"]
    assert write(api, "writers/w", b"{}", 1, key=token).ok()["written"] is True
    assert put(api, "samples/w/1", b"x", key=token) == 200
    assert make(api, "mine", version(2), key=token).ok()["written"] is True
    for ring in ("other", "unheard-of"):
        refused = api.post(f"/rings/{ring}/records", {"read": ["pointer"]}, key=token)
        assert "mine, shapes" in refused.refused(ErrorCode.WRONG_SCOPE, "ring")["message"]
        make(api, ring, version(3), key=token).refused(ErrorCode.WRONG_SCOPE, "ring")


def test_the_token_opens_nothing_but_rings(api: Api) -> None:
    make(api)
    held, token = running(api, "shapes")
    with api.unchanged():
        for method, target in (
            ("GET", "/rings"),
            ("DELETE", "/rings/shapes"),
            ("GET", f"/job/{held.id}"),
            ("POST", f"/heartbeat/{held.id}"),
            ("GET", "/work"),
            ("GET", "/data"),
            ("GET", "/keys"),
        ):
            api.call(method, target, key=token).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    assert held.token not in token


def test_the_token_ends_with_the_attempt(api: Api) -> None:
    make(api)
    held, token = running(api, "shapes")
    held.release().ok()
    read_it = {"read": ["pointer"]}
    api.post("/rings/shapes/records", read_it, key=token).refused(ErrorCode.KEY_REVOKED, "x-api-key")
    again = api.claim(machine_id="m-2")
    api.post("/rings/shapes/records", read_it, key=token).refused(ErrorCode.KEY_UNKNOWN, "x-api-key")
    new = ring_token(again.id, again.token)
    api.post("/rings/shapes/records", read_it, key=new).ok()
    # A lease that ran out may be proved again: until then its processes go on.
    api.clock.advance(again.item["lease_duration_s"] + 10)
    api.post("/rings/shapes/records", read_it, key=new).ok()
    api.clock.advance(3600)
    api.post("/rings/shapes/records", read_it, key=new).refused(ErrorCode.KEY_EXPIRED, "x-api-key")


def test_a_token_of_a_job_without_rings_or_of_none_opens_nothing(api: Api) -> None:
    make(api)
    held, token = running(api)
    assert held.item["rings"] == []
    secret = token.rpartition("_")[2]
    unknown = "00000000-0000-4000-8000-000000000000"
    for presented in (token, f"batonring_{unknown}_{secret}", f"batonring_{held.id}_", "batonring_x_y", "batonring_"):
        api.get("/rings/shapes/keys", query={"prefix": "inbox/"}, key=presented).refused(
            ErrorCode.KEY_UNKNOWN, "x-api-key"
        )


def test_a_key_of_the_scope_ring_opens_the_tenants_rings_and_nothing_else(api: Api) -> None:
    make(api)
    key = api.issue(TENANT, Scope.RING)
    assert write(api, "pointer", b"1", 1, key=key).ok()["written"] is True
    for target in ("/jobs", "/rings", "/work"):
        api.get(target, key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    api.post("/rings/shapes/records", {}, key="worker").refused(ErrorCode.WRONG_SCOPE, "x-api-key")


def test_jobs_that_differ_in_their_rings_are_not_the_same_submission(api: Api) -> None:
    key = {"idempotency-key": "one"}
    api.submit(headers=key, rings=["shapes"])
    api.post("/job", {"command": ["train"], "rings": ["other"]}, headers=key).refused(
        ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key"
    )
    api.post("/job", {"command": ["train"], "rings": ["No Ring"]}).refused(ErrorCode.INVALID_VALUE, "rings.0")


@pytest.mark.parametrize("key", ["worker", "submit"])
def test_samples_of_rings_are_not_written_by_other_calls(api: Api, key: str) -> None:
    make(api)
    put(api, "samples/w/1", b"as it was")
    place = {"bucket": DATA_BUCKET, "key": f"rings/shapes/{ID}/samples/w/1"}
    with api.unchanged():
        api.get("/upload/token", query=place, key=key).refused(ErrorCode.INVALID_KEY, "key")
        download = api.get("/download/token", query=place, key=key) if key == "worker" else None
        if download is not None:
            download.refused(ErrorCode.WRONG_SCOPE, "key")


@pytest.mark.parametrize(("prefix", "paths"), [("", ["rings/notes.txt", "train.py"]), ("rings/shapes/", ["samples"])])
def test_an_input_that_has_rings_below_it_means_the_files_beside_them(api: Api, prefix: str, paths: list[str]) -> None:
    make(api)
    put(api, "samples/w/1", b"x")
    for name in ("train.py", "rings/notes.txt"):
        api.put_object(DATA_BUCKET, name, b"y")
    api.submit(inputs=[{"prefix": prefix}])
    held = api.claim()
    found = [one["path"] for one in api.get(f"/job/{held.id}/inputs", headers=held.headers).ok()["inputs"]]
    assert sorted(path.split(f"{ID}/")[-1].split("/w/")[0] for path in found) == paths


def test_a_job_uses_so_many_rings_at_most_whoever_names_them(api: Api) -> None:
    job = {"recipe": "generator@1", "parameters": {"function": "a:b", "ring": "baton:one-more"}}
    named = [f"ring-{number}" for number in range(16)]
    api.post("/job", {**job, "rings": named}).refused(ErrorCode.INVALID_VALUE, "rings")
    assert len(api.post("/job", {**job, "rings": [*named[:15], "one-more"]}).ok()["rings"]) == 16
