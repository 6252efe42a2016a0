"""Every named failpoint: in which process it lies, at which function, and before or after its call.

A name is what happens there; `kill_at.py` wraps the functions, so nothing of this is in the product. A function that
is renamed makes its process end with a message, and tests/restart/test_failpoints.py fail.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Failpoint:
    """`function` is "module:name" or "module:Class.method"; `when` is "before" or "after" its body."""

    process: str
    function: str
    when: str

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    def place(self) -> tuple[Any, str]:
        """The object that has the function, and the function's name there. The module must have been imported.

        Raises AttributeError if it is not there any more."""
        module, _, path = self.function.partition(":")
        *owners, name = path.split(".")
        owner: Any = sys.modules[module]
        for part in owners:
            owner = getattr(owner, part)
        if name not in vars(owner):
            raise AttributeError(f"the failpoint at {self.function} lies nowhere: the function is gone")
        return owner, name

    def check(self) -> None:
        """Raises ImportError or AttributeError unless the function exists."""
        import_module(self.module)
        self.place()


def _points(process: str, package: str, lines: str) -> dict[str, Failpoint]:
    """Each line: name, before or after, function below the package."""
    rows = [line.split() for line in lines.strip().splitlines()]
    return {name: Failpoint(process, f"{package}.{function}", when) for name, when, function in rows}


FAILPOINTS: dict[str, Failpoint] = {
    **_points("daemon", "preload.daemon", """
        generation.loading_begun     after   generations:Catalog.begin
        generation.loader_started    after   loader_process:LoaderProcess.start
        generation.plan_received     before  loads:Loads._allocate
        generation.reserved          after   capacity:Ledger.reserve
        generation.allocated         after   loads:Loads._allocate
        generation.granted           after   loader_process:LoaderProcess.send
        generation.mid_read          after   wire:progress
        generation.committed_heard   after   loads:_read_tables
        generation.loader_exited     before  loads:Loads._commit
        generation.unsealed          before  segments.host:HostSegment.seal
        generation.sealed            after   segments.host:HostSegment.seal
        generation.unparked          before  parking:Parking.park
        generation.manifest_parked   after   notify:Notifier.store
        generation.parked            after   parking:Parking.park
        catalog.unsaved              before  parking:Parking.save
        catalog.body_written         after   catalog_file:_pack
        catalog.saved                after   parking:Parking.save
        generation.ready             after   residency:Residency.commit
        generation.answered          after   service:WeightCacheService._describe
        retire.begun                 before  residency:Residency.retire
        retire.ended                 after   residency:Residency.retire
        free.begun                   before  generations:Catalog.remove
        free.manifest_forgotten      after   notify:Notifier.forget
        free.unparked                after   parking:Parking.drop
        free.done                    after   generations:Generation.free
        fail.begun                   before  residency:Residency.fail
        fail.done                    after   residency:Residency.fail
        attach.resolved              after   cache:WeightCache.resolve
        attach.granted               after   leases:LeaseBook.grant
        attach.answered              after   service:WeightCacheService._attached
        handover.asked               before  handover:Handover._answer
        handover.redeemed            after   leases:LeaseBook.redeem
        handover.sent                after   handover:Handover._answer
        lease.ending                 before  residency:Residency.release
        lease.ended                  after   residency:Residency.release
        reclaim.claimed              after   leases:LeaseBook.claim
        restore.catalog_read         after   parking:Parking._read_catalog
        restore.revived              after   residency:Residency.revive
        restore.begun_anew           after   parking:Parking.begin
        restore.unready              before  notify:Notifier.ready
        restore.ready                after   notify:Notifier.ready
    """),
    **_points("keeper", "preload.daemon", """
        keeper.storing               before  keeper_store:Store.apply
        keeper.stored                after   keeper_store:Store.apply
        keeper.removing              before  keeper_store:Store._remove
        keeper.removed               after   keeper_store:Store._remove
        keeper.daemon_started        after   keeper:Keeper._watch
        keeper.daemon_forked         before  keeper:_exec
        keeper.daemon_died           before  keeper:Keeper._on_death
        keeper.daemon_buried         after   keeper:Keeper._on_death
        keeper.adopting              before  keeper:Keeper._adopt
        keeper.adopted               after   keeper:Keeper._adopt
    """),
    **_points("client", "preload.engine.client", """
        client.attached              before  attach:_map
        client.fetched               after   attach:fetch_descriptors
        client.mapped                after   attach:_map
        client.unbound               before  attach:bind
        client.bound                 after   attach:bind
    """),
    **_points("loader", "preload.engine.loading", """
        loader.job_received          after   control:Control.receive_job
        loader.opened                after   job:open_and_resolve
        loader.planned               after   job:make_plan
        loader.granted               after   control:Control.receive_grant
        loader.reading               before  fill:Filler._put
        loader.read                  after   job:_read
        loader.uncommitted           after   job:make_manifest
        loader.committed             after   job:_run
        loader.verifying             before  job:verify
        loader.verified              after   job:verify
        loader.hashing               before  fill:Filler._process
        loader.digested              after   job:make_receipts
    """),
    **_points("template", "preload.engine.template", """
        template.asked               before  server:TemplateServer._answer
        template.forked              before  server:TemplateServer._watch
        template.answered            after   server:TemplateServer._watch
        template.reaping             before  server:TemplateServer._reap
        fork.begun                   before  child:become
        fork.tied                    after   child:die_with_frontend
        fork.became                  after   child:become
    """),
    **_points("core", "preload.engine.core", """
        core.begun                   before  process:main
        core.importing               before  process:run
        core.built                   before  core:EngineCore.__init__
        core.kv_allocated            after   sizing:KVSizing.allocate
        core.warmed_up               after   core:EngineCore.warm_up
        core.unserving               before  server:CoreServer.serve
        core.serving                 after   server:CoreServer.serve
        core.stream_opened           after   server:CoreService.Generate
        core.stepping                before  core:EngineCore.step
        core.committing              after   core:EngineCore._append
        core.stepped                 after   core:EngineCore.step
        core.sent                    after   loop:OutputStream.send
        core.draining                after   server:CoreService.drain
        promotion.asked              before  server:CoreService.Promote
        promotion.allocating         before  loop:StepLoop._allocate
        promotion.allocated          after   loop:StepLoop._allocate
        promotion.done               after   server:CoreService.Promote
    """),
    "core.attached": Failpoint("core", "preload.engine.client.attach:attach", "after"),
    **_points("frontend", "preload.engine.frontend", """
        rollout.begun                before  rollout:Rollout._side_by_side
        rollout.loaded               after   rollout:Rollout._load
        rollout.core_started         before  supervisor:Supervisor.wait_serving
        rollout.core_ready           after   supervisor:Supervisor.wait_serving
        rollout.canary_sung          after   rollout:check_canary
        rollout.switched             before  rollout:Rollout._drain
        rollout.drained              after   rollout:Rollout._drain
        rollout.old_ended            before  rollout:Rollout._retire
        rollout.old_retired          after   rollout:Rollout._retire
    """),
}  # fmt: skip
