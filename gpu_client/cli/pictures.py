"""What a job has stored before its end: shown by `baton watch` as links, and fetched by `baton fetch --so-far`."""

from __future__ import annotations

from gpu_client.cli.formats import count, duration, size
from gpu_client.cli.session import SHOWN_ID_CHARACTERS, Session

from baton.contract.artifacts import StoredArtifact
from baton.contract.jobs import JobState, JobView
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError, UnexpectedAnswer, Unreachable

LOOK_EVERY_S = 10.0
"""A look is a call of the API and a list in the store."""
MAX_SHOWN = 8
"""At once; the others are counted."""
_PER_PAGE = 500


class Stored:
    """Everything that is stored of a job's outputs, each path as the last attempt stored it."""

    def __init__(self, client: BatonClient, job_id: str) -> None:
        """Raises what a call raises."""
        self.by_path: dict[str, StoredArtifact] = {}
        self.expires_in_s = 0
        """How long the links can be used."""
        for page in pages(lambda cursor: client.artifacts(job_id, limit=_PER_PAGE, cursor=cursor)):
            self.expires_in_s = page.expires_in_s
            for one in page.artifacts:
                other = self.by_path.get(one.path)
                if other is None or other.epoch <= one.epoch:
                    self.by_path[one.path] = one


class Pictures:
    """Shows the files of a job whose name says a step when they appear, as links; each once."""

    def __init__(self, session: Session, client: BatonClient, *, as_json: bool, look_every_s: float) -> None:
        """`look_every_s`: how often `look` will be called."""
        self._session = session
        self._client = client
        self._as_json = as_json
        self._pause = max(1, round(LOOK_EVERY_S / look_every_s))
        self._looks = 0
        self._seen: set[str] = set()
        self._known = True
        self._state: JobState | None = None

    def look(self, job_id: str, state: JobState) -> None:
        """Show what is new. Asks at the first look, now and then while the job runs, and when its state changes."""
        moved, self._state = state is not self._state, state
        due = moved or (state is JobState.RUNNING and self._looks % self._pause == 0)
        self._looks += 1
        if not due or not self._known:
            return
        try:
            stored = Stored(self._client, job_id)
        except (ApiError, UnexpectedAnswer):
            self._known = (
                False  # an older control plane, or a newer one: whatever else is wrong is said of the job itself
            )
            return
        except Unreachable:
            self._state = None  # the next look asks again, and the watching itself says that it cannot
            return
        found = [one for one in stored.by_path.values() if one.step is not None and one.path not in self._seen]
        if found:
            self._seen.update(one.path for one in found)
            self._show(job_id, sorted(found, key=lambda one: (one.step or 0, one.path)), stored.expires_in_s)

    def _show(self, job_id: str, found: list[StoredArtifact], expires_in_s: int) -> None:
        if self._as_json:
            for one in found:
                told = {**one.model_dump(), "expires_in_s": expires_in_s}
                self._session.screen.json_line({"id": job_id, "artifact": told})
            return
        earlier = found[:-MAX_SHOWN]
        if earlier:
            short = job_id[:SHOWN_ID_CHARACTERS]
            said = count(len(earlier), "earlier picture")
            self._session.screen.say(f"{said}; for all: baton fetch {short} DIR --so-far")
        for one in found[-MAX_SHOWN:]:
            note = f"({size(one.size_bytes or 0)}, link valid for {duration(expires_in_s)})"
            self._session.screen.link(f"step {one.step}: ", one.path, one.url, note)


def outputs_so_far(client: BatonClient, job: JobView) -> JobView:
    """The job with what it has stored so far in the place of its outputs; a complete one as it is."""
    if job.state is JobState.COMPLETE:
        return job
    so_far = [
        {"path": one.path, "bucket": one.bucket, "key": one.key, "size_bytes": one.size_bytes}
        for one in Stored(client, job.id).by_path.values()
    ]
    return JobView.model_validate({**job.model_dump(), "artifacts": so_far})
