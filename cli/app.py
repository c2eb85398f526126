"""The ``kvstrata`` command: one typer application, assembled from the command families."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvstrata.cli import (
    auth,
    bench,
    block,
    daemons,
    dev_cluster,
    drain,
    health,
    leadership,
    namespace,
    node_check,
    replicas,
    route,
    serve,
    tenant,
    top,
    traffic,
    why,
)
from kvstrata.cli.credentials import PoolGroup
from kvstrata.cli.doctor.command import doctor
from kvstrata.cli.ending import leaving_quietly
from kvstrata.cli.output import Exit, say
from kvstrata.cli.settings import PREFIX
from kvstrata.proto.errors import KVError

app = typer.Typer(
    name="kvstrata",
    cls=PoolGroup,
    help="A shared KV-cache pool for LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(daemons.master)
app.command()(daemons.storage)
app.command()(serve.serve)
app.command()(dev_cluster.dev)
app.command()(health.health)
app.command()(leadership.masters)
app.command()(top.top)
app.command()(doctor)
for command in (drain.drain, drain.undrain, drain.remove):
    health.node.command()(command)
health.node.command("check")(node_check.node_check)
app.add_typer(health.node, name="node")
app.add_typer(replicas.replicas, name="replicas")
app.add_typer(tenant.tenant, name="tenant")
app.add_typer(namespace.namespace, name="namespace")
app.add_typer(block.block, name="block")
app.add_typer(auth.auth, name="auth")
app.command()(why.why)
app.command()(route.route)
app.command()(bench.bench)
app.command()(traffic.replay)
app.command()(traffic.demo)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version as installed_version

        typer.echo(f"kvstrata {installed_version('kvstrata')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A shared KV-cache pool for LLM serving."""


def main() -> None:
    """Run the command line; the process's exit code is the command's."""
    with leaving_quietly():
        try:
            app(auto_envvar_prefix=PREFIX)
        except KVError as error:  # from option callbacks, before a command's own handling
            say(f"error: {error}", err=True)
            sys.exit(int(Exit.USAGE))


if __name__ == "__main__":
    main()
