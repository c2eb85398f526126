"""What the chart starts, started here: flags that exist, ready lines, probes, ends within the grace period."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from kvstrata.cli.app import app
from kvstrata.client import Client
from kvstrata.master.stores.redis_url import parse_redis_url
from tests import command_line
from tests.helm.pods import Running, arguments_of, close, environment_of, local, start
from tests.helm.rendering import Object, Values, main_container, objects, one, value_sets, workloads
from tests.redis_server import RedisServer, needs_redis
from tests.waiting import until

FIELDS = {"metadata.name": "kvstrata-master-0", "spec.nodeName": "host-1", "status.podIP": "127.0.0.1"}
SMALL: Values = {"dram": "64Mi", "slab": "8Mi", "drainSeconds": 5}
SETS = value_sets()


@pytest.mark.parametrize("name", SETS)
def test_every_flag_is_one_of_the_command(name: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for workload in workloads(objects(SETS[name])):
        container = main_container(workload)
        command, *flags = arguments_of(container, environment_of(container, FIELDS))
        with commands[command].make_context(command, list(flags)) as context:  # it takes what it has parsed
            assert context.args == []
        for flag in flags:
            assert "$(" not in flag, f"{flag} names a variable that the container has not"


@pytest.fixture
def running() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def run(stack: contextlib.ExitStack, workload: Object, base: Path, masters: str = "", name: str = "pod-0") -> Running:
    base.mkdir(exist_ok=True)
    started = start(workload, base, {**FIELDS, "metadata.name": name}, masters)
    stack.callback(close, started)
    return started


def active(master: str) -> list[str]:
    done = command_line.run("node", "list", "--master", master, "--json")
    assert done.returncode == 0, done.stderr
    return [row["node_id"] for row in json.loads(done.stdout) if row["state"] == "active"]


def test_a_master_and_a_node_of_each_host(tmp_path: Path, running: contextlib.ExitStack) -> None:
    devices = [{"hostPath": "/mnt/nvme0", "size": "64Mi"}]
    found = objects({"storage": {**SMALL, "ssd": {"devices": devices}}})
    master = run(running, one(found, "StatefulSet", "-master"), tmp_path / "m")
    node = run(running, one(found, "DaemonSet", "-storage"), tmp_path / "n", master.ready["channel"])
    assert (tmp_path / "m/var/lib/kvstrata/master.db").exists()
    assert (tmp_path / "n/mnt/nvme0/kv").is_dir()
    until(lambda: active(master.ready["channel"]) == ["host-1"])
    until(lambda: master.probe("readinessProbe") == 200)
    for process in (master, node):
        assert {process.probe(each) for each in ("startupProbe", "livenessProbe", "readinessProbe")} == {200}
    with contextlib.closing(Client(master.ready["channel"])) as client:
        space = client.namespace("m", block_bytes=4096, block_tokens=16, hash_bytes=16)
        rows = client.register(bytearray(b"k" * 8 * 4096)).rows(space)
        hashes = [bytes([n]) * 16 for n in range(8)]
        assert client.store(space, "s", hashes, rows).stored.all()
        assert client.load(space, "s", hashes, rows).loaded.all()
    assert node.end() == 0 and master.end() == 0


def test_a_node_of_a_claim_drains_when_it_ends(tmp_path: Path, running: contextlib.ExitStack) -> None:
    found = objects({"storage": {**SMALL, "kind": "StatefulSet", "drainSeconds": 20}})
    master = run(running, one(found, "StatefulSet", "-master"), tmp_path / "m")
    channel = master.ready["channel"]
    workload = one(found, "StatefulSet", "-storage")
    nodes = [run(running, workload, tmp_path / f"n{n}", channel, f"storage-{n}") for n in range(2)]
    until(lambda: active(channel) == ["storage-0", "storage-1"])
    with contextlib.closing(Client(channel)) as client:
        space = client.namespace("m", block_bytes=4096, block_tokens=16, hash_bytes=16)
        rows = client.register(bytearray(b"k" * 64 * 4096)).rows(space)
        hashes = [bytes([n]) * 16 for n in range(64)]
        assert client.store(space, "s", hashes, rows).stored.all()
        assert nodes[0].end() == 0
        until(lambda: client.lookup(space, "s", hashes).hit_blocks == 64)
        assert client.load(space, "s", hashes, rows).loaded.all()


def test_pods_on_one_host_never_have_the_same_socket() -> None:
    """A client finds a node's socket by its path: in a claim, which is mounted alike everywhere, by the pod's name."""
    container = main_container(one(objects(SETS["statefulset"]), "StatefulSet", "-storage"))
    paths = set()
    for name in ("storage-0", "storage-1"):
        arguments = arguments_of(container, environment_of(container, {**FIELDS, "metadata.name": name}))
        paths |= {each for each in arguments if each.startswith("--data=")}
    assert len(paths) == 2
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "data"]
    assert all(each.startswith(f"--data={mount}/kv-") for each in paths)


def test_three_masters_on_a_redis_with_a_password(tmp_path: Path, running: contextlib.ExitStack) -> None:
    needs_redis()
    redis = RedisServer(tmp_path / "redis", password="pool")
    running.callback(redis.kill)
    values: Values = {
        "master": {"replicas": 3},
        "redis": {"url": f"redis://{redis.address}/0", "passwordSecret": {"name": "redis"}},
        "storage": SMALL,
    }
    found = objects(values)
    workload = one(found, "StatefulSet", "-master")
    masters = []
    for number in range(workload["spec"]["replicas"]):
        base = tmp_path / f"m{number}"
        secret = base / "etc/kvstrata/redis/password"
        secret.parent.mkdir(parents=True)
        secret.write_text("pool")
        masters.append(run(running, workload, base, name=f"kvstrata-master-{number}"))
    assert "pool" not in " ".join(masters[0].process.args)  # type: ignore[arg-type]
    channels = ",".join(master.ready["channel"] for master in masters)
    node = run(running, one(found, "DaemonSet", "-storage"), tmp_path / "n", channels)

    def leading() -> list[bool]:
        return [json.loads(master.get("/healthz")[1])["leading"] for master in masters]

    until(lambda: sum(leading()) == 1)
    until(lambda: all(master.probe("readinessProbe") == 200 for master in masters))
    until(lambda: active(channels) == ["host-1"])
    first = leading().index(True)
    assert masters.pop(first).end() == 0
    until(lambda: sum(leading()) == 1)
    assert node.probe("readinessProbe") == 200


@pytest.mark.parametrize(
    ("name", "shown", "options"),
    [
        ("production", "rediss://kvstrata:***@redis.databases.svc:6379/0", {"replicas": 1}),
        ("everything", "rediss+sentinel://kv:***@a:26379,b:26379/mymaster/0", {"sentinel_password": "sentinel"}),
    ],
)
def test_the_state_that_the_flags_name_is_understood(
    name: str, shown: str, options: dict[str, object], tmp_path: Path
) -> None:
    container = main_container(one(objects(SETS[name]), "StatefulSet", "-master"))
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (each for each in mounted if each.startswith("/etc/")):
        (tmp_path / path[1:]).mkdir(parents=True)
        for file in ("ca.crt", "tls.crt", "tls.key"):
            (tmp_path / path[1:] / file).touch()
        (tmp_path / path[1:] / "password").write_text(Path(path).name)
    arguments = local(arguments_of(container, environment_of(container, FIELDS)), tmp_path, "", mounted)
    flags = dict(each.partition("=")[::2] for each in arguments)
    address = parse_redis_url(flags["--state"], Path(flags["--state-password-file"]))
    assert (str(address), address.password) == (shown, "redis")
    assert address.ca and address.cert and address.key
    assert {option: getattr(address, option) for option in options} == options


def test_a_full_node_stays_within_its_limit(tmp_path: Path, running: contextlib.ExitStack) -> None:
    """Of the smallest blocks, with little memory beside the pool: what a control group would count against it."""
    devices = [{"hostPath": "/mnt/nvme0", "size": "128Mi"}]
    tight: Values = {"memoryBase": "128Mi", "blockBytes": "4Ki", "ssd": {"devices": devices}, "drainSeconds": 0}
    found = objects({"storage": {**SMALL, **tight}})
    master = run(running, one(found, "StatefulSet", "-master"), tmp_path / "m")
    node = run(running, one(found, "DaemonSet", "-storage"), tmp_path / "n", master.ready["channel"])
    until(lambda: active(master.ready["channel"]))
    with contextlib.closing(Client(master.ready["channel"])) as client:
        space = client.namespace("m", block_bytes=4096, block_tokens=16, hash_bytes=16)
        rows = client.register(bytearray(1024 * 4096)).rows(space)
        numbers = itertools.count()

        def full() -> bool:
            hashes = [next(numbers).to_bytes(16, "little") for _ in range(1024)]
            client.store(space, "s", hashes, rows)
            metrics = node.get("/metrics")[1]
            used = dict(re.findall(r"^kvstrata_node_(dram_bytes_used|ssd_blocks) (\S+)$", metrics, re.M))
            return float(used["dram_bytes_used"]) > 48 << 20 and float(used["ssd_blocks"]) > 16_000

        until(full, 60.0)
    limit = node.container["resources"]["limits"]["memory"]
    peak = sum(_peak_kib(process) for process in (node.process.pid, *_children(node.process.pid)))
    assert peak << 10 < int(limit.removesuffix("Mi")) << 20
    assert peak << 10 > 64 << 20, "the pool alone is more"


def _peak_kib(pid: int) -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found
    return int(found[1])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_masters_are_named_as_their_pods_are() -> None:
    found = objects(SETS["production"])
    workload = one(found, "StatefulSet", "-master")
    service = one(found, "Service", "-masters")
    container = main_container(workload)
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    hosts = []
    for number in range(workload["spec"]["replicas"]):
        pod = {"metadata.name": f"{workload['metadata']['name']}-{number}"}
        arguments = arguments_of(container, environment_of(container, pod))
        (host,) = [each.partition("=")[2] for each in arguments if each.startswith("--advertise=")]
        hosts.append(host)
    (channel,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "channel"]
    wanted = ",".join(f"{host}:{channel}" for host in hosts)
    assert one(found, "ConfigMap", "-client")["data"]["KVSTRATA_MASTER"] == wanted
    assert f"--master={wanted}" in main_container(one(found, "DaemonSet", "-storage"))["args"]
