"""What follows from the hosts and links of a check, without processes."""

from dataclasses import asdict, replace

from paramserver.config import ClusterConfig, Config, ServerConfig
from paramserver.tools.doctor.diagnosis import Diagnosis
from paramserver.tools.doctor.hosts import Link, Participant, conclude, exchanges, group_hosts, ranks_of_command

VERSIONS = {"torch": "2.13.0", "paramserver": "0.1.0", "Python": "3.11.7"}
RPC = Config(cluster=ClusterConfig(num_servers=1, num_trainers=2))


def participant(rank, name, **changes):
    fields = {"host": name, "address": f"10.0.0.{rank + 1}", "port": 1, "interface": "eth0", "mtu": 1500}
    made = Participant(rank=rank, ranks=[rank], name=name, cores=2, gpus=0, versions=VERSIONS, findings=[], **fields)
    return replace(made, **changes)


def concluded(participants, links=(), config=RPC):
    found = Diagnosis()
    conclude(found, config, group_hosts(participants), participants, links)
    return found


def texts(found):
    return [one.text for one in found.problems]


def subject(found, title):
    return {fact.name: fact.text for one in found.subjects if one.title == title for fact in one.facts}


def test_a_pair_that_cannot_connect_is_one_sentence_for_each_direction():
    hosts = [participant(0, "node1"), participant(1, "node2")]
    found = concluded(hosts, [Link(0, 1, error="no answer within 5 s"), Link(1, 0, error="Connection refused")])
    assert texts(found) == [
        "node1 cannot connect to node2 at 10.0.0.2: no answer within 5 s",
        "node2 cannot connect to node1 at 10.0.0.1: Connection refused",
    ]
    assert "cluster.interface" in found.problems[0].cure
    assert subject(found, "links") == {"node1 -> node2": "no connection", "node2 -> node1": "no connection"}


def test_a_firewall_in_one_direction_is_named():
    hosts = [participant(0, "node1"), participant(1, "node2")]
    found = concluded(hosts, [Link(0, 1, error="no answer within 5 s"), Link(1, 0, 1e-4, 1e9, 0.0, "", True)])
    assert texts(found) == [
        "node1 cannot connect to node2 at 10.0.0.2: no answer within 5 s, while node2 reaches node1"
    ]
    assert found.problems[0].cure.startswith("a firewall lets connections pass in one direction")
    assert subject(found, "links")["node2 -> node1"] == "1000 MB/s, round trip 0.10 ms"


def test_a_path_with_a_smaller_mtu_is_named():
    hosts = [participant(0, "node1", mtu=9000), participant(1, "node2")]
    lost = "small messages arrive, and one of 64 KiB does not: no answer within 5 s"
    found = concluded(hosts, [Link(0, 1, 1e-4, None, 0.0, lost, True)])
    assert texts(found) == [f"from node1 to node2 at 10.0.0.2: {lost}"]
    assert "smaller MTU" in found.problems[0].cure
    assert [one.text for one in found.findings if not one.is_problem] == [
        "the interfaces of the hosts have different MTUs: node1 9000, node2 1500"
    ]


def test_clocks_that_differ_are_noted_once():
    hosts = [participant(0, "node1"), participant(1, "node2")]
    found = concluded(hosts, [Link(0, 1, 1e-4, 1e9, -7.5, "", True), Link(1, 0, 1e-4, 1e9, 7.5, "", True)])
    (note,) = found.findings
    assert note.text.startswith("the clock of node2 is 7.5 s behind that of node1:")
    assert found.exit_code == 0


def test_other_versions_are_a_problem_once_for_each_host():
    other = {**VERSIONS, "torch": "2.15.0"}
    hosts = [participant(0, "node1"), participant(1, "node2", versions=other), participant(2, "node2", versions=other)]
    assert texts(concluded(hosts)) == ["node2 has torch 2.15.0, and rank 0 has 2.13.0"]


def test_the_transport_of_each_host_is_the_one_of_the_run():
    hosts = [participant(0, "node1"), participant(1, "node1"), participant(2, "node2")]
    shown = subject(concluded(hosts), "hosts")
    assert shown["node1"].startswith("rank 0, 1; ")
    assert shown["node1"].endswith("trainers use shared memory")
    assert shown["node2"].endswith("trainers use TCP")
    over_rpc = subject(concluded(hosts, config=replace(RPC, server=ServerConfig(transport="rpc"))), "hosts")
    assert over_rpc["node2"].endswith("trainers use RPC")
    found = concluded(hosts, config=replace(RPC, server=ServerConfig(transport="shared_memory")))
    assert texts(found) == [
        "server.transport (shared_memory) must have all ranks on one host, and the trainers of node2 are not on that "
        "of the servers"
    ]


def test_the_findings_of_a_host_have_its_name_and_come_once():
    own = Diagnosis()
    own.problem("the disk is full", "remove runs")
    sent = [asdict(one) for one in own.findings]
    hosts = [participant(0, "node1"), participant(1, "node2", findings=sent), participant(2, "node2", findings=sent)]
    assert [(one.host, one.text) for one in concluded(hosts).findings] == [("node2", "the disk is full")]
    alone = [participant(0, "node1", findings=sent), participant(1, "node1", findings=sent)]
    found = Diagnosis(list(own.findings))
    conclude(found, RPC, group_hosts(alone), alone, [])
    assert [(one.host, one.text) for one in found.findings] == [("", "the disk is full")]


def test_hosts_of_one_name_have_their_address():
    hosts = group_hosts([participant(0, "node", host="a"), participant(1, "node", host="b")])
    assert [host.title for host in hosts] == ["node (10.0.0.1)", "node (10.0.0.2)"]


def test_only_links_that_a_run_uses_are_measured():
    assert exchanges(RPC, [0], [2])
    assert not exchanges(RPC, [1], [2])
    assert exchanges(Config(mode="ddp"), [1], [2])
    colocated = Config(cluster=ClusterConfig(colocate=True, num_servers=2, num_trainers=3))
    assert [ranks_of_command(colocated, rank) for rank in (0, 1, 4)] == [[0, 2], [1, 3], [4]]
