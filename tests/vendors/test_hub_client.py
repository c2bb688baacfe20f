"""The fake Hub answers huggingface_hub's own client as the Hub does."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from tests.kits.network.fake_hub import COMMIT, TOKEN, FakeHub, sha256

FILES = {"README.md": b"# set", **{f"data/{number} x.parquet": bytes([number]) * 200 for number in range(4)}}


def test_the_client_lists_and_downloads_a_private_data_set(tmp_path: Path) -> None:
    with FakeHub({"acme/web": FILES}, private=True) as hub:
        api = HfApi(endpoint=hub.url, token=TOKEN)
        assert api.repo_info("acme/web", repo_type="dataset", revision="main").sha == COMMIT
        tree = list(api.list_repo_tree("acme/web", repo_type="dataset", recursive=True))
        found = {one.path: (one.size, one.lfs and one.lfs.sha256) for one in tree if isinstance(one, RepoFile)}
        assert found == {
            path: (len(data), sha256(data) if len(data) >= hub.lfs_from_bytes else None) for path, data in FILES.items()
        }
        for path, data in FILES.items():
            place = api.hf_hub_download("acme/web", path, repo_type="dataset", revision=COMMIT, local_dir=tmp_path)
            assert Path(place).read_bytes() == data
        assert hub.leaks == []


def test_the_client_knows_the_refusals() -> None:
    with FakeHub({"acme/web": FILES}) as hub:
        api = HfApi(endpoint=hub.url, token=TOKEN)
        with pytest.raises(RepositoryNotFoundError):
            api.repo_info("acme/none", repo_type="dataset", revision="main")
        with pytest.raises(RevisionNotFoundError):
            api.repo_info("acme/web", repo_type="dataset", revision="v2")
        with pytest.raises(EntryNotFoundError):
            list(api.list_repo_tree("acme/web", "none", repo_type="dataset", recursive=True))
        hub.gated = True
        with pytest.raises(GatedRepoError):
            api.get_hf_file_metadata(url=f"{hub.url}/datasets/acme/web/resolve/{COMMIT}/README.md")
