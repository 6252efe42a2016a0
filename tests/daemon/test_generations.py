from dataclasses import replace

import pytest

from preload.daemon.errors import BadRequestError, LoaderDiedError, NotResidentError
from preload.daemon.generations import (
    Catalog,
    Generation,
    Manifest,
    Rank,
    Receipt,
    Recipe,
    Source,
    State,
    generation_id,
)
from preload.daemon.segments.host import HostSegment

KEEP = Recipe("auto", "keep", "float32", "", 1)
F32 = Recipe("auto", "f32", "float32", "", 1)


def ready(catalog: Catalog, path: str = "/m", recipe: Recipe = KEEP, digest: str = "d") -> Generation:
    source = Source(path, recipe, Rank())
    generation = catalog.begin(source)
    segment = HostSegment.allocate(4096, "test")
    segment.seal()
    generation.commit(Manifest(b"", digest, f"resolved {recipe.quantization}", (4096,), 1), [segment], [])
    catalog.bind(source, generation, [Receipt(path, 1, 2, 3, 4, 5, b"x")])
    return generation


def test_identity_is_the_hash_of_content_and_recipe() -> None:
    assert generation_id("d", "r") == generation_id("d", "r")
    assert len({generation_id(d, r) for d in ("d", "e") for r in ("r", "s")}) == 4
    assert len(generation_id("d", "r")) == 64


def test_generation_without_commit_has_no_identity_and_no_memory() -> None:
    generation = Catalog().begin(Source("/m", KEEP, Rank()))
    assert (generation.state, generation.id, generation.resident_bytes) == (State.LOADING, "", 0)


def test_failed_generation_keeps_its_reason_and_gives_its_memory_back() -> None:
    generation = ready(Catalog())
    assert generation.fail(LoaderDiedError("gone")) == 4096
    assert generation.state is State.FAILED
    assert generation.failure is not None
    assert generation.failure.message == "gone"
    assert generation.segments == []


def test_generation_without_an_id_of_its_own_is_found_by_its_serial() -> None:
    catalog = Catalog()
    loading, old = catalog.begin(Source("/n", KEEP, Rank())), ready(catalog)
    assert (loading.name, old.name) == ("@1", old.id[:12])
    old.fail(LoaderDiedError("corrupted"))
    new = ready(catalog, "/copy")
    assert new.id == old.id, "loaded again after it was found to be corrupted"
    assert (old.name, new.name) == ("@2", new.id[:12])
    assert [catalog.by_id(g.name) for g in (loading, old, new)] == [loading, old, new]
    with pytest.raises(NotResidentError, match="@9"):
        catalog.by_id("@9")
    for wrong in ("@", "@x", "@-1", "@²"):
        with pytest.raises(BadRequestError):
            catalog.by_id(wrong)


def test_generation_is_found_by_a_unique_prefix_only() -> None:
    catalog = Catalog()
    generation = ready(catalog)
    ready(catalog, recipe=F32)
    assert catalog.by_id(generation.id[:8]) is generation
    with pytest.raises(BadRequestError, match="shorter than 8"):
        catalog.by_id(generation.id[:7])
    with pytest.raises(NotResidentError):
        catalog.by_id("0" * 64)


def test_digest_finds_the_generation_of_the_same_recipe() -> None:
    catalog = Catalog()
    kept, f32 = ready(catalog), ready(catalog, recipe=F32)
    assert catalog.by_digest("d", KEEP, Rank()) is kept
    assert catalog.by_digest("d", F32, Rank()) is f32
    with pytest.raises(NotResidentError):
        catalog.by_digest("other", KEEP, Rank())


def test_binding_a_source_anew_returns_what_it_held_before() -> None:
    catalog = Catalog()
    old = ready(catalog)
    new = ready(catalog, path="/other", digest="e")
    assert catalog.bind(Source("/m", KEEP, Rank()), new, []) is old
    assert catalog.sources(old) == [Source("/m", KEEP, Rank())]  # what it was loaded from
    assert {s.path for s in catalog.sources(new)} == {"/m", "/other"}


def test_a_new_load_forgets_the_failure_of_the_same_source() -> None:
    catalog = Catalog()
    source = Source("/m", KEEP, Rank())
    catalog.begin(source).fail(LoaderDiedError("gone"))
    catalog.begin(source)
    assert [g.state for g in catalog] == [State.LOADING]


def test_old_failures_are_forgotten() -> None:
    catalog = Catalog()
    for number in range(Catalog.MAX_FAILED + 5):
        catalog.begin(Source(f"/m{number}", KEEP, Rank())).fail(LoaderDiedError("gone"))
        catalog.forget_old_failures()
    assert len(list(catalog)) == Catalog.MAX_FAILED


def test_a_prefix_of_two_ids_is_ambiguous() -> None:
    """Two real ids never share eight digits within reach, so these are made to."""
    catalog = Catalog()
    first, second = ready(catalog), ready(catalog, recipe=F32)
    first.id, second.id = "abcdef01" + "0" * 56, "abcdef01" + "1" * 56
    with pytest.raises(BadRequestError, match="ambiguous"):
        catalog.by_id("abcdef01")
    assert catalog.by_id("abcdef010") is first


def test_one_digest_under_two_configurations_is_ambiguous() -> None:
    catalog = Catalog()
    first = ready(catalog)
    second = catalog.begin(Source("/other", KEEP, Rank()))
    second.commit(Manifest(b"", "d", "resolved with another rope", (), 1), [], [])
    with pytest.raises(BadRequestError, match="ambiguous") as refusal:
        catalog.by_digest("d", KEEP, Rank())
    assert first.id in refusal.value.message
    assert second.id in refusal.value.message


def test_id_of_two_roles_needs_a_rank() -> None:
    catalog = Catalog()
    target = ready(catalog)
    draft = catalog.begin(Source("/m", KEEP, Rank(role="draft")))
    draft.commit(Manifest(b"", "d", "resolved keep", (), 1), [], [])
    assert draft.id == target.id
    with pytest.raises(BadRequestError, match="draft"):
        catalog.by_id(target.id)
    assert catalog.by_id(target.id, Rank(role="draft")) is draft
    assert catalog.by_id(target.id, Rank()) is target


def test_a_generation_is_remembered_under_so_many_names_only() -> None:
    catalog = Catalog()
    generation = ready(catalog)
    for number in range(2 * Catalog.MAX_NAMES):
        catalog.bind(Source(f"/link{number}", KEEP, Rank()), generation, [])
    names = catalog.names(generation)
    assert len(names) <= Catalog.MAX_NAMES + 1
    assert names[-1].path == f"/link{2 * Catalog.MAX_NAMES - 1}"


def test_outlines_are_those_of_ready_generations_that_the_recipe_allows() -> None:
    catalog = Catalog()
    source = Source("/other", KEEP, Rank())
    assert catalog.outlines(source) == frozenset()
    catalog.begin(Source("/loading", KEEP, Rank()))
    first = ready(catalog, "/a", digest="a")
    ready(catalog, "/b", recipe=F32)
    second = ready(catalog, "/c", digest="c")
    for generation, outline in ((first, b"1"), (second, b"2")):
        assert generation.manifest is not None
        generation.manifest = replace(generation.manifest, outline=outline)
    assert catalog.outlines(source) == {b"1", b"2"}
    assert catalog.outlines(replace(source, rank=Rank(role="draft"))) == frozenset()
    first.fail(LoaderDiedError("gone"))
    assert catalog.outlines(source) == {b"2"}
