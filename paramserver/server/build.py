"""The parts of server 0, and how they depend on each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from paramserver.buffers.kinds import buffer_class
from paramserver.checkpoint import stage_copy
from paramserver.config import Config, num_servers_of, server_computes
from paramserver.consistency import Consistency, DynamicSteps, Ledger, make_consistency
from paramserver.context import StopRequest
from paramserver.devices import place_parameters
from paramserver.distributed.local_calls import LocalCallServer
from paramserver.distributed.membership import Member
from paramserver.distributed.session import server_name
from paramserver.optim.clipping import clipping_of
from paramserver.parameters.model import frozen_state_dict, refuse_synced_batch_norm
from paramserver.parameters.tables import describe_large
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.server.aggregator import Aggregator
from paramserver.server.coordinator import ShardCoordinator, split_over_servers
from paramserver.server.model_service import ModelService
from paramserver.server.parameter_server import ParameterServer
from paramserver.server.parameter_store import ParameterStore, check_optimizers
from paramserver.server.quorum import Gathers, Quorum, Staging, Validations
from paramserver.server.roster import Roster
from paramserver.server.server_run import Network, ServerRun, SubmitFn, run_now
from paramserver.server.shard import ParameterShard
from paramserver.server.trainer_sources import TrainerSources
from paramserver.server.update_pipeline import plan_buckets
from paramserver.server.updates import Updates
from paramserver.task import Task
from paramserver.transport.base import ServerTransport
from paramserver.transport.compression import block_of, make_codec, make_compressor
from paramserver.transport.messages import JoinReply
from paramserver.transport.rpc import RpcServerTransport
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shared_memory import ServerSharedMemory


def build_server(
    task: Task,
    config: Config,
    trainers: int,
    checkpoints: CheckpointManager,
    stop: StopRequest,
    segments: SegmentHost | None = None,
    on_trainer_lost: Callable[[Member], None] = lambda member: None,
    local_calls: LocalCallServer | None = None,
    submit: SubmitFn = run_now,
    network: Network | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ParameterServer:
    """Return server 0 with the parameters of the checkpoint that the run resumes from, if it does.

    Without ``segments`` all tensors are sent in messages, and without ``local_calls`` no call uses a unix socket.
    ``on_trainer_lost`` is called with a trainer whose place another process may take.

    Raises:
        UnsupportedConfiguration: the model, its optimizers or its memory do not go with the configuration.
    """
    network = network or Network()
    monitor, servers = checkpoints.monitor, num_servers_of(config)
    run = ServerRun(submit)
    rules, ledger = build_rules(config, trainers, checkpoints)

    # The order below matters: the rules decide how memory is shared, and the memory where the parameters are allocated.
    device = place_parameters(config).device
    connect = None if local_calls is None else local_calls.connect
    shared_memory = ServerSharedMemory(segments, config.server, rules.lockstep, monitor.note, device, connect)
    # Other processes access the parameters themselves in lockstep, and whenever servers own them together; trainers
    # that run freely, or whose server has them on a GPU, read snapshots instead.
    in_place = (rules.lockstep or servers > 1) and segments is not None and device.type == "cpu"
    allocate = shared_memory.allocate_parameters if in_place else None
    store = ParameterStore(task, config, allocate, checkpoints.resumes)
    if trainers > 1:
        refuse_synced_batch_norm(store.model, "in mode rpc with more than one trainer")
    check_optimizers(config, store)
    if (large := describe_large(store.model)) is not None:
        monitor.note(large)
    if store.tables:
        rules.validate_at_barriers()
    if store.updater.parameters_of:
        assert rules.waits_for_all, "check_optimizers refuses others"
        rules.several_updates = True
    # Right after the store: the random states that it returns are those after the model was built.
    model_service = ModelService(task, config, store) if server_computes(config) else None
    parameters = store.parameters
    # A trainer that joins may read while servers write. That is never the snapshot of the version that they make.
    shared_memory.open_snapshots(parameters.layout, trainers, lambda: (aggregator.version, parameters.flats))

    # The checkpoint is loaded before parameters and states are split into shards.
    checkpoints.restore_model(store.model)
    checkpoints.restore_optimizer(store.updater)
    if checkpoints.is_wanted(monitor.step):
        checkpoints.publish(monitor.step, store.model, store.updater)  # the first samples may need it
    shards, updater, states_of_others = split_over_servers(store, servers, block_of(config.server))
    buckets, why_not_by_bucket = plan_buckets(config, store.updater, parameters.layout, shards)

    def snapshot() -> list[Tensor]:
        return store.snapshot()[0]  # the same as that of a validation

    shard = ParameterShard(
        updater,
        make_codec(config.server, store.device),
        run.lock,
        monitor.step,
        buckets[0] if buckets else None,
        submit,
        generation=checkpoints.generation,
        seed=config.seed,
        clipping=clipping_of(config.training),
        attach=shared_memory.gradients,
        snapshot=snapshot if servers == 1 else None,
        compressor=make_compressor(config.server),
        # Where the model stays on the server, its trainers see every change.
        step_scope=store.refuse_changes if model_service is None else nullcontext,
    )
    coordinator = ShardCoordinator(
        config,
        run,
        network,
        stop,
        store,
        shards,
        states_of_others,
        buckets,
        monitor.step,
        lambda: (shared_memory.address, shared_memory.parameters_key),
    )
    updates = Updates(
        config,
        store,
        shard,
        shards,
        [server_name(index) for index in range(1, servers)],
        network,
        run,
        lambda: coordinator.shares_memory,
        coordinator.unreachable,
    )
    training = config.training
    dynamic_steps = DynamicSteps(training.local_steps) if config.server.dynamic_local_steps else None
    aggregator = Aggregator(
        rules, ledger, store, shard, updates, monitor, stop, run.fail_with, dynamic_steps, training.accumulate_batches
    )
    aggregator.publish_with(checkpoints, run.lock)

    # Of the checkpoint, also for a trainer that joins later: all leave the same validation out.
    validated_step = monitor.validated_step

    def welcome() -> JoinReply:
        if not coordinator.shares_memory:
            shared_memory.disable()
        return JoinReply(
            stage_copy(frozen_state_dict(store.model)) if model_service is None else {},
            parameters.layout,
            rules.step,
            rules.lockstep,
            shared_memory.address,
            None,
            buckets or (shards if servers > 1 else ()),
            why_not_by_bucket=why_not_by_bucket,
            parameters_of=store.updater.parameters_of,
            validates_averages=store.updater.validates_averages,
            validated_step=validated_step,
        )

    sent = buckets or (shards if servers > 1 else (None,))

    def new_transport() -> ServerTransport:
        if model_service is not None:
            return model_service.new_transport()
        return RpcServerTransport(shard.sent_version, sent[0])

    return assemble(
        config,
        trainers,
        checkpoints,
        run,
        shard,
        aggregator,
        coordinator,
        shared_memory,
        welcome,
        new_transport,
        network,
        on_trainer_lost,
        model_service,
        clock,
    )


def build_rules(config: Config, trainers: int, checkpoints: CheckpointManager) -> tuple[Consistency, Ledger]:
    """Return the consistency model and the ledger, as they were when the checkpoint was made."""
    rules = make_consistency(config, trainers, checkpoints.monitor.step, checkpoints.monitor.samples)
    rules.load_state_dict(checkpoints.consistency_state)
    times_due = None if buffer_class(config.buffer.kind).repeats else config.buffer.pseudo_epochs
    ledger = Ledger(times_due, checkpoints.generation)
    ledger.load_state_dict(checkpoints.ledger_state, trainers)
    return rules, ledger


def assemble(
    config: Config,
    trainers: int,
    checkpoints: CheckpointManager,
    run: ServerRun,
    shard: ParameterShard,
    aggregator: Aggregator,
    coordinator: ShardCoordinator,
    shared_memory: ServerSharedMemory,
    welcome: Callable[[], JoinReply],
    new_transport: Callable[[], ServerTransport],
    network: Network,
    on_trainer_lost: Callable[[Member], None] = lambda member: None,
    model_service: ModelService | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ParameterServer:
    """Return a server of these parts, with those that know of trainers but not of parameters.

    The simulation of the protocol has its own shard, network and clock, and everything else from here.
    """
    sources = TrainerSources(config, trainers, aggregator.rules, aggregator.ledger, checkpoints.monitor)
    validations = Validations(aggregator, run, trainers)
    staging = Staging(checkpoints, aggregator, sources, run, clock)
    gathers = Gathers(run, lambda: aggregator.rules.participants, config.cluster.timeout_s)
    roster = Roster(
        config,
        trainers,
        run,
        aggregator,
        sources,
        Quorum(run, validations, staging, gathers),
        staging,
        coordinator,
        checkpoints,
        welcome,
        new_transport,
        network,
        on_trainer_lost,
        clock,
    )
    run.on_failure(aggregator.pop_waiters)
    return ParameterServer(
        config, run, shard, aggregator, roster, validations, staging, gathers, shared_memory, model_service
    )
