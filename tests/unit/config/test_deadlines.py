"""The limits of waits, derived from the config."""

from paramserver.config import ClusterConfig, Config, Deadlines, ServerConfig, SimulationsConfig


def test_deadlines_follow_from_two_keys():
    config = Config(cluster=ClusterConfig(timeout_s=100.0), server=ServerConfig(lost_after_s=20.0))
    deadlines = Deadlines.of(config)
    assert (deadlines.heartbeat_s, deadlines.silent_s, deadlines.wait_s) == (1.0, 20.0, 100.0)
    assert (deadlines.stacks_s, deadlines.starting_s, deadlines.failed_s, deadlines.ended_s) == (14.0, 25.0, 25.0, 30.0)
    assert (deadlines.store_s, deadlines.join_s, deadlines.last_write_s) == (102.0, 121.0, 630.0)
    simulations = Config(server=config.server, simulations=SimulationsConfig(timeout_s=7.0))
    assert Deadlines.of(simulations).last_write_s == 637.0


def test_several_heartbeats_are_sent_before_a_process_counts_as_lost():
    sent_every_s = [ServerConfig(lost_after_s=limit_s).heartbeat_s for limit_s in (0.5, 5.0, 60.0)]
    assert sent_every_s == [0.1, 1.0, 1.0]


def test_each_deadline_has_a_text():
    texts = Deadlines.of(Config()).texts()
    assert texts["silent_s"] == (5.0, "without a heartbeat, a process counts as lost (server.lost_after_s)")
    assert all(text for _, text in texts.values())
