"""Test both modes: the same samples become readable in the same order, at different times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_client.ring.format.manifest import EMPTY, ObjectId, RingManifest, SampleClaim, Slot, next_manifest
from gpu_client.ring.settings import RingSettings

NOW_MS = 1_790_000_000_000
packs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), min_size=1, max_size=40)


def claimed(made: list[tuple[str, int]]) -> list[SampleClaim]:
    """Writers begin, then claim packs of their own, one after the other in time."""
    names = sorted({writer for writer, _ in made})
    seqs = dict.fromkeys(names, 0)
    claims = [SampleClaim(ObjectId(name, 1, 0), 0, NOW_MS + place) for place, name in enumerate(names)]
    for place, (writer, samples) in enumerate(made):
        seqs[writer] += 1
        claims.append(SampleClaim(ObjectId(writer, 1, seqs[writer]), samples, NOW_MS + 100 + place))
    return claims


def published(claims: list[SampleClaim], settings: RingSettings, looks: list[int]) -> list[RingManifest]:
    """Return all manifests of a publisher that sees `looks` more claims each time, and publishes the rest at once."""
    manifests, last, there = [], EMPTY, 0
    for more in [*looks, len(claims)]:
        there += more
        while (ahead := next_manifest(last, claims[:there], settings, NOW_MS + 1000)) is not None:
            manifests.append(last := ahead)
    while (ahead := next_manifest(last, claims, settings, NOW_MS + 1000, at_once=True)) is not None:
        manifests.append(last := ahead)
    return manifests


def inserted(manifests: list[RingManifest]) -> list[Slot]:
    """Samples in the order in which they became readable."""
    found = {slot.inserted: slot for manifest in manifests for slot in manifest.slots}
    return [found[number] for number in sorted(found)]


@given(packs, st.integers(3, 9), st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 6), max_size=12))
def test_rolling_and_generation_insert_the_same_samples_in_the_same_order(
    made: list[tuple[str, int]], cap: int, rolling_looks: list[int], generation_looks: list[int]
) -> None:
    claims = claimed(made)
    rolling = published(claims, RingSettings(cap=cap, pack=3, mode="rolling"), rolling_looks)
    generation = published(claims, RingSettings(cap=cap, pack=3, mode="generation"), generation_looks)
    total = sum(samples for _, samples in made)
    for manifests in (rolling, generation):
        slots = inserted(manifests)
        assert [slot.inserted for slot in slots] == list(range(total)), "none twice, and none left out"
        assert manifests[-1].inserted == total
    assert [(slot.object, slot.number) for slot in inserted(rolling)] == [
        (slot.object, slot.number) for slot in inserted(generation)
    ]


@given(packs, st.integers(3, 9), st.lists(st.integers(0, 6), max_size=12))
def test_a_generation_is_new_as_a_whole_and_a_rolling_ring_has_the_newest(
    made: list[tuple[str, int]], cap: int, looks: list[int]
) -> None:
    claims = claimed(made)
    before = EMPTY
    for manifest in published(claims, RingSettings(cap=cap, pack=3, mode="generation"), looks):
        if manifest.inserted > before.inserted:
            assert [slot.inserted for slot in manifest.slots] == list(range(before.inserted, manifest.inserted))
            assert len(manifest) == cap or manifest.inserted == sum(samples for _, samples in made)
            assert RingManifest.from_bytes(manifest.to_bytes(), manifest.number) == manifest
        else:
            assert manifest.slots == before.slots, "only writers that begin"
        before = manifest
    for manifest in published(claims, RingSettings(cap=cap, pack=3, mode="rolling"), looks):
        first = max(0, manifest.inserted - cap)
        assert [slot.inserted for slot in manifest.slots] == list(range(first, manifest.inserted))
