"""TokenStore: what every implementation does alike."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import KeyKind, Scope
from functions.domain.access.api_keys import ApiKey
from functions.domain.access.sessions import LINK_LIFE_S
from functions.domain.errors import Refusal, WriteConflict
from functions.domain.records import TransferGrant
from functions.storage.dynamodb.tokens import GRANT_RETENTION_S, KEY_RETENTION_S, SESSION_RETENTION_S
from tests.conformance.store_kit import NOW, TENANT
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.store_sets import Cloud


def key(key_id: str = "k1", **more: Any) -> ApiKey:
    fields: dict[str, Any] = {
        "id": key_id,
        "tenant": TENANT,
        "name": "laptop \u00fc",
        "secret_sha256": "a" * 64,
        "scopes": (Scope.SUBMIT, Scope.WORKER),
        "created_at": NOW,
    }
    return ApiKey(**{**fields, **more})


def grant(token: str = "t1", **more: Any) -> TransferGrant:
    fields: dict[str, Any] = {
        "token_sha256": token,
        "purpose": "download",
        "tenant": TENANT,
        "bucket": "training-data",
        "key": "a/\u00fc b.png",
        "expires_at": NOW + 60,
    }
    return TransferGrant(**{**fields, **more})


def test_a_key_is_read_back(cloud: Cloud) -> None:
    assert cloud.tokens.get_key("k1") is None
    made = key(expires_at=NOW + 5, machine="nights/a1b2c3d4-nights-9f8e7d", queues=("default",), tags={"team": "a"})
    cloud.tokens.put_key(made)
    assert cloud.tokens.get_key("k1") == made


def test_a_link_and_a_token_are_read_back_and_not_listed(cloud: Cloud) -> None:
    made = [key(kind.value, kind=kind, parent="k1", expires_at=NOW + 5) for kind in KeyKind]
    for one in made:
        cloud.tokens.put_key(one)
    assert [cloud.tokens.get_key(one.id) for one in made] == made
    assert [one.kind for one in cloud.tokens.list_keys(TENANT, limit=9).items] == [KeyKind.SESSION, KeyKind.SHARE]


def test_a_key_id_is_given_once(cloud: Cloud) -> None:
    cloud.tokens.put_key(key())
    with pytest.raises(WriteConflict):
        cloud.tokens.put_key(key(secret_sha256="b" * 64))
    assert cloud.tokens.get_key("k1") == key()


def test_a_key_is_replaced_only_if_it_exists(cloud: Cloud) -> None:
    with pytest.raises(WriteConflict):
        cloud.tokens.replace_key(key())
    assert cloud.tokens.get_key("k1") is None
    cloud.tokens.put_key(key())
    cloud.tokens.replace_key(key(expires_at=NOW + 9))
    assert cloud.tokens.get_key("k1") == key(expires_at=NOW + 9)


def test_a_revocation_cannot_be_undone(cloud: Cloud) -> None:
    cloud.tokens.put_key(key())
    cloud.tokens.replace_key(key(revoked_at=NOW))
    # A rotation that read the key before it was revoked.
    with pytest.raises(WriteConflict):
        cloud.tokens.replace_key(key(expires_at=NOW + 9))
    cloud.tokens.replace_key(key(revoked_at=NOW + 1))
    assert cloud.tokens.get_key("k1") == key(revoked_at=NOW + 1)


@pytest.mark.parametrize("limit", [1, 2, 5, 50])
def test_a_tenants_keys_are_listed_oldest_first(cloud: Cloud, limit: int) -> None:
    keys = [key(f"k{n}", created_at=NOW + n // 2) for n in range(5)]
    for one in reversed(keys):
        cloud.tokens.put_key(one)
    cloud.tokens.put_key(key("foreign", tenant="other"))
    cloud.tokens.put_grant(grant())
    assert all_pages(lambda cursor: cloud.tokens.list_keys(TENANT, limit=limit, cursor=cursor), full=limit) == keys


def test_a_cursor_of_another_tenants_keys_is_refused(cloud: Cloud) -> None:
    for n in range(2):
        cloud.tokens.put_key(key(f"k{n}"))
    cursor = cloud.tokens.list_keys(TENANT, limit=1).cursor
    with pytest.raises(Refusal) as refused:
        cloud.tokens.list_keys("other", limit=1, cursor=cursor)
    assert refused.value.code is ErrorCode.INVALID_CURSOR


def test_a_download_token_is_redeemed_once(cloud: Cloud) -> None:
    cloud.tokens.put_grant(grant())
    assert cloud.tokens.get_grant("t1") == grant()
    assert cloud.tokens.redeem("t1", NOW) == grant()
    assert cloud.tokens.redeem("t1", NOW) is None
    assert cloud.tokens.get_grant("t1") is None


def test_a_download_token_ends_with_its_life(cloud: Cloud) -> None:
    cloud.tokens.put_grant(grant())
    assert cloud.tokens.redeem("t1", NOW + 60) is None
    assert cloud.tokens.get_grant("t1") == grant()
    assert cloud.tokens.redeem("t1", NOW + 59) == grant()


def test_an_upload_token_is_not_redeemed(cloud: Cloud) -> None:
    upload = grant(purpose="upload")
    cloud.tokens.put_grant(upload)
    assert cloud.tokens.redeem("t1", NOW) is None
    assert cloud.tokens.get_grant("t1") == upload


def test_unknown_tokens_are_nothing(cloud: Cloud) -> None:
    assert cloud.tokens.get_grant("t1") is None
    assert cloud.tokens.redeem("t1", NOW) is None
    # A key's id is no token.
    cloud.tokens.put_key(key())
    assert cloud.tokens.redeem("k1", NOW) is None
    assert cloud.tokens.get_key("k1") == key()


def test_the_broom_is_told(ministack: Cloud) -> None:
    ministack.tokens.put_grant(grant())
    ministack.tokens.put_key(key("lasting"))
    ministack.tokens.put_key(key("ending", expires_at=NOW))
    assert ministack.raw("tokens", pk="GRANT#t1")["ttl"] == {"N": str(NOW + 60 + GRANT_RETENTION_S)}
    assert "ttl" not in ministack.raw("tokens", pk="KEY#lasting")
    assert ministack.raw("tokens", pk="KEY#ending")["ttl"] == {"N": str(NOW + KEY_RETENTION_S)}
    for kind in KeyKind:
        ministack.tokens.put_key(key(kind.value, kind=kind, expires_at=NOW))
        retention_s = KEY_RETENTION_S if kind is KeyKind.SHARE else SESSION_RETENTION_S
        assert ministack.raw("tokens", pk=f"KEY#{kind.value}")["ttl"] == {"N": str(NOW + retention_s)}
    assert SESSION_RETENTION_S > LINK_LIFE_S, "a link is used once"


def test_no_secret_is_stored(ministack: Cloud) -> None:
    ministack.tokens.put_key(key())
    row = ministack.raw("tokens", pk="KEY#k1")
    assert set(row) == {"pk", "tenant", "created_sk", "doc"}
