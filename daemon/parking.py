"""Parking: what a daemon leaves with its keeper, so that the next life serves the same weights.

Each generation's manifest and segments are stored as descriptors when it becomes READY, then the catalog says so;
the catalog forgets a generation before its descriptors are let go. A life that ends anywhere in between leaves
descriptors that no catalog names, and the next one drops them. Loads under way are not parked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from preload.protos import catalog_pb2 as pb

from . import wire
from .catalog_file import CatalogFile, CatalogFileError, CatalogVersionError
from .devices import Devices
from .errors import BadRequestError, CacheError
from .generations import Catalog, Generation, Receipt, Source
from .leases import Lease, LeaseBook
from .notify import Notifier
from .segments import Segment
from .segments.driver import DeviceInfo

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
CATALOG_NAME = "catalog"


@dataclass(frozen=True)
class Revived:
    """A generation of the last life, with the sources bound to it and the leases on it."""

    generation: Generation
    sources: list[tuple[Source, list[Receipt]]]
    leases: list[Lease]


class Parking:
    """Owns the catalog file and the manifests' memfds; speaks to the keeper through `notifier`."""

    def __init__(self, notifier: Notifier, catalog: Catalog, leases: LeaseBook, devices: Devices, epoch: int) -> None:
        self._notifier = notifier
        self._catalog = catalog
        self._leases = leases
        self._devices = devices
        self._file: CatalogFile | None = None
        self._manifests: dict[Generation, int] = {}
        self.epoch = epoch

    @property
    def is_kept(self) -> bool:
        """Whether somebody holds what is parked."""
        return self._notifier.has_manager

    def restore(self, fds: dict[str, int]) -> list[Revived]:
        """Takes the last life's descriptors over and returns its generations; what is not whole is dropped.

        Raises BadRequestError on a catalog of an unknown version: nothing is touched then."""
        found: list[Revived] = []
        catalog_fd = fds.pop(CATALOG_NAME, None)
        if catalog_fd is not None:
            self._file = CatalogFile(catalog_fd)
            parked = self._read_catalog(self._file)
            self.epoch = max(self.epoch, parked.epoch + 1)
            for device in parked.devices:
                self._devices.adopt(DeviceInfo(device.name, device.total_bytes, device.granularity_bytes))
            found = [revived for entry in parked.generations for revived in self._revive(entry, fds)]
        for name, fd in fds.items():
            log.warning("a parked descriptor that nothing describes is dropped: %s", name)
            self._notifier.forget(name)
            os.close(fd)
        return found

    def _read_catalog(self, file: CatalogFile) -> pb.Catalog:
        try:
            parked = pb.Catalog.FromString(file.read())
        except CatalogFileError as error:
            log.error("%s: starting empty", error)
            return pb.Catalog()
        except CatalogVersionError as error:
            raise _unknown_version(str(error)) from error
        except DecodeError as error:  # whole, and yet not ours to read
            raise _unknown_version(f"the parked catalog is not readable: {error}") from error
        if parked.format_version != FORMAT_VERSION:
            raise _unknown_version(f"the parked catalog has format {parked.format_version}")
        return parked

    def _revive(self, entry: pb.ParkedGeneration, fds: dict[str, int]) -> Iterator[Revived]:
        num_descriptors = 0 if entry.blocks else len(entry.segment_bytes)
        names = [_manifest_name(entry.key), *(_segment_name(entry.key, i) for i in range(num_descriptors))]
        if not all(name in fds for name in names):
            missing = [name for name in names if name not in fds]
            log.warning("generation %s is dropped: %s did not come back", entry.id[:12], ", ".join(missing))
            return
        manifest_fd, *segment_fds = (fds[name] for name in names)
        segments = self._revive_segments(entry, segment_fds)
        if segments is None:
            log.warning("generation %s is dropped: a parked segment is not what was sealed", entry.id[:12])
            return
        serialized = os.pread(manifest_fd, os.fstat(manifest_fd).st_size, 0)
        try:
            generation = wire.revived_generation(entry, serialized, segments)
            sources = [wire.revived_source(source, entry.device) for source in entry.sources]
        except CacheError as error:
            log.warning("generation %s is dropped: %s", entry.id[:12], error.message)
            return
        for name in names:
            del fds[name]
        self._manifests[generation] = manifest_fd
        yield Revived(generation, sources, [wire.revived_lease(lease, generation) for lease in entry.leases])

    def _revive_segments(self, entry: pb.ParkedGeneration, fds: list[int]) -> list[Segment] | None:
        """None if any of them is not what was parked."""
        if entry.blocks:
            found = self._devices.holders.revive(entry.device, entry.holder_id, entry.blocks, entry.segment_bytes)
            return None if found is None else [*found]
        device = self._devices.of(entry.device)
        handles = entry.handles or [b""] * len(fds)
        revived = [device.revive(*parked) for parked in zip(fds, entry.segment_bytes, handles, strict=True)]
        segments = [segment for segment in revived if segment is not None]
        return segments if len(segments) == len(revived) else None

    def park(self, generation: Generation) -> None:
        """Stores the descriptors of a generation that is about to be READY; `save` then makes them count."""
        if not self._notifier.has_manager:
            return
        assert generation.manifest is not None
        fd = os.memfd_create("preload:manifest", os.MFD_CLOEXEC)
        os.write(fd, generation.manifest.serialized)
        self._manifests[generation] = fd
        self._store(generation)

    def _store(self, generation: Generation) -> bool:
        """False if nobody listens: then nothing more is tried."""
        return self._notifier.store(_manifest_name(generation.key), self._manifests[generation]) and all(
            self._notifier.store(_segment_name(generation.key, index), segment.fd)
            for index, segment in enumerate(generation.segments)
            if segment.fd >= 0
        )

    def drop(self, generation: Generation, num_segments: int) -> None:
        """Lets go of a generation that the catalog has forgotten; memory returns when nobody maps it any more."""
        fd = self._manifests.pop(generation, None)
        if fd is None:
            return
        self.save()
        os.close(fd)
        self._notifier.forget(_manifest_name(generation.key))
        for index in range(num_segments):
            self._notifier.forget(_segment_name(generation.key, index))

    def save(self) -> None:
        """Writes the catalog as it is now: after every change of a generation, a binding or a lease."""
        if self._file is None:
            return
        message = pb.Catalog(format_version=FORMAT_VERSION, epoch=self.epoch)
        for info in self._devices.described():
            message.devices.add(
                name=info.name, total_bytes=info.total_bytes, granularity_bytes=info.granularity_bytes
            )
        for generation in self._manifests:
            bound = self._catalog.bindings(generation)
            message.generations.append(wire.parked_generation(generation, bound, self._leases.of(generation)))
        self._file.write(message.SerializeToString())

    def begin(self) -> None:
        """This life's catalog replaces the last one's. The keeper is given everything again: it may be another one
        than that which started us, and then it has nothing."""
        if not self._notifier.has_manager:
            return
        if self._file is None:
            self._file = CatalogFile.create()
            self.save()
            self._notifier.store(CATALOG_NAME, self._file.fd)
        else:
            self.save()
            self.store_all()

    def store_all(self) -> None:
        """Everything once more, with a keeper that knows nothing: descriptors first, then what describes them.

        Begun anew with the next keeper if this one goes meanwhile."""
        if self._file is not None and all(self._store(generation) for generation in self._manifests):
            self._notifier.store(CATALOG_NAME, self._file.fd)


def _unknown_version(what: str) -> BadRequestError:
    return BadRequestError(
        f"{what}, and this daemon reads format {FORMAT_VERSION}: the weights are kept; start the version that wrote "
        "it, or stop the service with its keeper to let them go"
    )


def _manifest_name(key: str) -> str:
    return f"{key}.manifest"


def _segment_name(key: str, index: int) -> str:
    return f"{key}.segment.{index}"
