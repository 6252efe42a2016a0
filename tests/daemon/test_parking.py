"""What one life of the daemon leaves for the next, in whatever state it was cut off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from preload.daemon import parking
from preload.daemon.catalog_file import CatalogFile
from preload.daemon.devices import Devices
from preload.daemon.errors import BadRequestError
from preload.daemon.generations import Catalog, Generation, Manifest, Phase, Rank, Receipt, Recipe, Source, State
from preload.daemon.holders import Holders
from preload.daemon.leases import LeaseBook
from preload.daemon.notify import Notifier
from preload.daemon.parking import Parking, Revived
from preload.daemon.segments.host import HostSegment
from preload.protos import weight_cache_pb2 as pb

RECIPE = Recipe("raw", "keep", "float32", "", 1)
RECEIPT = Receipt("/models/a", 1, 2, 3, 4, 5, b"digest")


class Keeper(Notifier):
    """Holds what it is told to hold. `after_each` sees every message's effect, as a daemon killed there leaves it."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.held: dict[str, int] = {}
        self.forgotten: list[str] = []
        self.snapshots: list[dict[str, int]] = []
        self.takes_snapshots = False

    def store(self, name: str, fd: int) -> bool:
        old = self.held.get(name)
        self.held[name] = os.dup(fd)
        if old is not None:
            os.close(old)
        self._look()
        return True

    def forget(self, name: str) -> bool:
        self.forgotten.append(name)
        fd = self.held.pop(name, None)
        if fd is not None:
            os.close(fd)
        self._look()
        return True

    def _look(self) -> None:
        if self.takes_snapshots:
            self.snapshots.append(self.hand_back())

    def hand_back(self) -> dict[str, int]:
        """As the next life receives it; the catalog is a copy, because the writer goes on."""
        found = {name: os.dup(fd) for name, fd in self.held.items()}
        if "catalog" in found:
            copy = os.memfd_create("copy")
            os.pwrite(copy, os.pread(found["catalog"], os.fstat(found["catalog"]).st_size, 0), 0)
            os.close(found["catalog"])
            found["catalog"] = copy
        return found


class Life:
    """One life's parking, with the catalog and the leases it speaks of."""

    def __init__(self, keeper: Notifier, fds: dict[str, int] | None = None) -> None:
        self.catalog = Catalog()
        self.leases = LeaseBook(10)
        self.parking = Parking(keeper, self.catalog, self.leases, Devices("80%", "90%", Holders("/nowhere", True)), 1)
        self.revived: list[Revived] = self.parking.restore(fds or {})
        for revived in self.revived:
            self.catalog.adopt(revived.generation)
            for source, receipts in revived.sources:
                self.catalog.bind(source, revived.generation, receipts)
            for lease in revived.leases:
                self.leases.adopt(lease)
        self.parking.begin()

    def ids(self) -> list[str]:
        return [revived.generation.id for revived in self.revived]

    def commit(self, name: str, sizes: tuple[int, ...] = (4096, 8192)) -> Generation:
        """A READY generation of some bytes, parked as a load parks it."""
        source = Source(f"/models/{name}", RECIPE, Rank())
        generation = self.catalog.begin(source)
        segments = [HostSegment.allocate(size, name) for size in sizes]
        for segment in segments:
            segment.seal()
        table = pb.Manifest(format_version=1, checkpoint_digest=name, resolved_recipe="{}", segment_bytes=sizes)
        manifest = Manifest(table.SerializeToString(), name, "{}", sizes, 0)
        generation.commit(manifest, segments, [Phase("read", 1, 2)])
        self.parking.park(generation)
        self.catalog.bind(source, generation, [RECEIPT])
        self.parking.save()
        return generation

    def free(self, generation: Generation) -> None:
        num_segments = len(generation.segments)
        self.catalog.remove(generation)
        self.parking.drop(generation, num_segments)
        generation.free()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def life(keeper: Keeper) -> Life:
    return Life(keeper)


def test_everything_comes_back(keeper: Keeper, life: Life) -> None:
    first, second = life.commit("a"), life.commit("b")
    lease, ticket = life.leases.grant(first, 77, "engine")
    life.leases.redeem(ticket, 4242)
    second.state = State.RETIRING
    life.parking.save()
    following = Life(keeper, keeper.hand_back())
    again, retiring = (revived.generation for revived in following.revived)
    assert (again.id, again.state, again.key) == (first.id, State.READY, first.key)
    assert (retiring.id, retiring.state) == (second.id, State.RETIRING)
    assert again.manifest == first.manifest
    assert (again.recipe, again.rank, again.device) == (first.recipe, first.rank, first.device)
    assert [segment.size_bytes for segment in again.segments] == [4096, 8192]
    assert again.load_phases == [Phase("read", 1, 2)]
    assert again.num_attaches == 1
    assert following.revived[0].sources == [(Source("/models/a", RECIPE, Rank()), [RECEIPT])]
    (parked,) = following.leases.all()
    assert (parked.id, parked.pid, parked.client, parked.unclaimed) == (lease.id, 77, "engine", True)
    assert (parked.mapped, parked.uid) == (True, 4242)
    assert following.parking.epoch == 2
    assert keeper.forgotten == []


def test_a_lease_is_claimed_with_its_secret_once(keeper: Keeper, life: Life) -> None:
    lease, _ = life.leases.grant(life.commit("a"), 77, "engine")
    life.parking.save()
    following = Life(keeper, keeper.hand_back())
    assert following.leases.claim(b"guessed", 78, "thief") is None
    claimed = following.leases.claim(lease.secret, 77, "engine")
    assert claimed is not None
    assert claimed[0].id == lease.id
    assert following.leases.redeem(claimed[1]) is claimed[0]
    assert following.leases.claim(lease.secret, 78, "thief") is None


def replace(fds: dict[str, int], name: str, fd: int) -> None:
    os.close(fds[name])
    fds[name] = fd


def unsealed(size: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def sealed(size: int) -> int:
    segment = HostSegment.allocate(size, "sealed")
    segment.seal()
    return segment.fd


@pytest.mark.parametrize("damage", ["segment", "manifest", "unsealed", "size", "other manifest", "broken manifest"])
def test_a_generation_that_is_not_whole_is_dropped_and_others_are_served(
    keeper: Keeper, life: Life, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = life.commit("a"), life.commit("b")
    fds = keeper.hand_back()
    match damage:
        case "segment":
            os.close(fds.pop(f"{broken.key}.segment.1"))
            os.close(keeper.held.pop(f"{broken.key}.segment.1"))
        case "manifest":
            os.close(fds.pop(f"{broken.key}.manifest"))
            os.close(keeper.held.pop(f"{broken.key}.manifest"))
        case "unsealed":
            replace(fds, f"{broken.key}.segment.0", unsealed(4096))
        case "size":
            replace(fds, f"{broken.key}.segment.0", sealed(8192))
        case "other manifest":
            replace(fds, f"{broken.key}.manifest", os.dup(fds[f"{whole.key}.manifest"]))
        case "broken manifest":
            os.pwrite(fds[f"{broken.key}.manifest"], b"\xff\xff\xff\xff", 0)
    following = Life(keeper, fds)
    assert following.ids() == [whole.id]
    assert f"generation {broken.id[:12]} is dropped" in caplog.text
    assert not [name for name in keeper.held if name.startswith(broken.key)]
    assert Life(keeper, keeper.hand_back()).ids() == [whole.id]


def test_a_catalog_of_an_unknown_version_is_refused_and_nothing_let_go(
    keeper: Keeper, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = life.commit("a")
    monkeypatch.setattr(parking, "FORMAT_VERSION", 7)
    with pytest.raises(BadRequestError, match="has format 1, and this daemon reads format 7"):
        Life(keeper, keeper.hand_back())
    assert keeper.forgotten == []
    monkeypatch.undo()
    assert Life(keeper, keeper.hand_back()).ids() == [generation.id]


@pytest.mark.parametrize("how", ["another file format", "another schema"])
def test_a_catalog_from_the_future_is_refused_and_nothing_let_go(keeper: Keeper, life: Life, how: str) -> None:
    generation = life.commit("a")
    fds = keeper.hand_back()
    if how == "another schema":
        CatalogFile(fds["catalog"]).write(b"\xff\xff\xff\xff not ours")
        CatalogFile(fds["catalog"]).write(b"\xff\xff\xff\xff not ours")
    else:
        os.pwrite(fds["catalog"], b"PRELOAD2", 512)
    with pytest.raises(BadRequestError, match="the weights are kept"):
        Life(keeper, fds)
    assert keeper.forgotten == []
    assert Life(keeper, keeper.hand_back()).ids() == [generation.id]


def test_a_broken_catalog_lets_everything_go(keeper: Keeper, life: Life, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing tells what the descriptors are: memory that nobody can serve must not stay."""
    life.commit("a")
    fds = keeper.hand_back()
    os.ftruncate(fds["catalog"], 100)
    assert Life(keeper, fds).ids() == []
    assert "no header that holds: starting empty" in caplog.text
    assert list(keeper.held) == ["catalog"]


def test_killed_between_any_two_messages_the_next_life_serves_what_was_ready(keeper: Keeper, life: Life) -> None:
    """Every message that a load or an eviction sends is a moment to die at."""
    resident = life.commit("resident")
    keeper.takes_snapshots = True
    arriving = life.commit("arriving")
    num_arriving = len(keeper.snapshots)
    life.free(resident)
    keeper.takes_snapshots = False
    assert num_arriving == 3
    assert len(keeper.snapshots) == 6
    for index, fds in enumerate(keeper.snapshots):
        ids = Life(Keeper(), fds).ids()
        assert ids == ([resident.id] if index < num_arriving else [arriving.id]), index


def test_a_freed_generation_leaves_nothing_with_the_keeper(keeper: Keeper, life: Life) -> None:
    life.free(life.commit("a"))
    assert list(keeper.held) == ["catalog"]
    assert Life(keeper, keeper.hand_back()).ids() == []


def test_a_new_keeper_gets_everything(keeper: Keeper, life: Life) -> None:
    generation = life.commit("a")
    before = set(keeper.held)
    keeper.held.clear()
    life.parking.store_all()
    assert set(keeper.held) == before
    assert Life(keeper, keeper.hand_back()).ids() == [generation.id]


def test_without_a_keeper_nothing_is_parked() -> None:
    before = len(os.listdir("/proc/self/fd"))
    life = Life(Notifier(""))
    generation = life.commit("a")
    life.parking.store_all()
    assert not life.parking.is_kept
    assert len(os.listdir("/proc/self/fd")) == before + 2, "two segments and nothing else"
    life.free(generation)


@pytest.fixture(autouse=True)
def _no_paths_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
