"""``weightsync store``: the versions in a store, listed, verified, removed and exported. Needs no coordinator."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.cli.commands import Command, CommandGroup
from weightsync.cli.options import Json, setting
from weightsync.errors import ConfigurationError, StaleSource, WeightSyncError

if TYPE_CHECKING:
    from weightsync.store.objects import ObjectStore
    from weightsync.store.signing import StoredVersion


class StoreCommand(Command):
    """A command that Ctrl-C ends at once: the library that waits for a store looks at no signal, for minutes."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as its base
        """See :class:`~weightsync.cli.commands.Command`."""
        if threading.current_thread() is not threading.main_thread():
            return super().invoke(ctx)
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            return super().invoke(ctx)
        finally:
            signal.signal(signal.SIGINT, before)


store_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode="markdown", help="Look after stored versions.")

StoreUrl = Annotated[str | None, setting("STORE", "A folder, or s3://bucket/prefix", None, "WHERE")]
OfRun = Annotated[str | None, typer.Option(help="Id of the run [default: the only one in the store].")]
_PUBLIC = "The run's public key, as `weightsync store key` prints it where the coordinator runs"
PublicKey = Annotated[str | None, setting("STORE_PUBLIC_KEY", _PUBLIC, "the key that this user's coordinator keeps", "TEXT")]
_Version = Annotated[str | None, typer.Argument(metavar="VERSION", help="`7`, or `RUN@7` [default: the newest].")]
_Timeout = Annotated[float, typer.Option(help="Seconds for everything.")]
_DAY = 86400.0
_GIVE = "give --key or WEIGHTSYNC_STORE_PUBLIC_KEY, as `weightsync store key` prints it at the coordinator"
_GO_THERE = "run this as the coordinator's user, with its WEIGHTSYNC_STATE_DIR"


class OpenedStore:
    """A store, a run in it, and the run's public key."""

    def __init__(self, where: str | None, run: str | None, key: str | None, advice: str = _GIVE) -> None:
        from weightsync.config import ClientSettings
        from weightsync.store.catalog import why_empty
        from weightsync.store.objects import ObjectStore

        if (where := where or ClientSettings.load().store) is None:
            raise ConfigurationError("which store? Give --store, or set WEIGHTSYNC_STORE")
        self.store: ObjectStore = ObjectStore(where)
        runs = (run,) if run else self.store.folders()
        if len(runs) != 1:
            several = f"the store {where} has {len(runs)} runs: name one with --run ({', '.join(runs)})"
            raise ConfigurationError(several if runs else why_empty(self.store, None))
        self.run = runs[0]
        self.public, self.public_text = _public_key(self.run, key, advice)

    def order(self, version: str | None) -> tuple[int, int]:
        """Epoch and number of a version, by default of the newest. Raises :class:`ConfigurationError` if there is none."""
        from weightsync.model import parse_label
        from weightsync.store.catalog import orders, why_empty

        if version is None:
            listed = orders(self.store, self.run)
            if not listed:
                raise ConfigurationError(why_empty(self.store, self.run))
            return listed[-1]
        parsed = parse_label(version)
        if parsed is None or parsed[0] not in (None, self.run):
            raise ConfigurationError(f"{version!r} is no version of run {self.run}: give its number, or {self.run}@NUMBER")
        return parsed[1:]

    def load(self, order: tuple[int, int]) -> StoredVersion:
        """See :func:`weightsync.store.catalog.load`."""
        from weightsync.model import label_of
        from weightsync.store.catalog import load

        try:
            return load(self.store, self.run, order, self.public)
        except StaleSource:
            name = label_of(self.run, *order)
            raise StaleSource(f"there is no version {name} in {self.store.url}; `weightsync store ls` lists them") from None


def _public_key(run: str, key: str | None, advice: str) -> tuple[bytes, str]:
    from weightsync.config import ServerSettings, variable
    from weightsync.server.store_key import kept_key
    from weightsync.store.signing import public_key

    if text := key or variable("WEIGHTSYNC_STORE_PUBLIC_KEY"):
        return public_key(text), text
    if kept := kept_key(settings := ServerSettings.load(), run):
        return kept.public, kept.public_text
    raise ConfigurationError(f"no key of run {run} is in the state folder ({settings.state_dir}): {advice}")


def _row(opened: OpenedStore, order: tuple[int, int]) -> dict[str, Any]:
    from weightsync.model import label_of

    row: dict[str, Any] = {"version": label_of(opened.run, *order)}
    try:
        version = opened.load(order)
    except WeightSyncError as error:
        return row | {"error": str(error)}
    stored = version.stored
    chains = [rank.chain for rank in stored.ranks]
    return row | {
        "step": stored.step,
        "stored": stored.stored,
        "base": None if stored.base is None else str(stored.base),
        "ranks": len(chains),
        "objects": len(version.objects),
        "written_bytes": sum(chain[-1].nbytes for chain in chains),
        "needed_bytes": sum(item.nbytes for item in version.objects.values()),
        "digest": version.version.digest,
    }


@store_app.command(cls=StoreCommand)
def ls(store: StoreUrl = None, run: OfRun = None, key: PublicKey = None, json: Json = False) -> None:
    """List the versions of a run, and check their signatures.

    ```
    weightsync store ls --store /mnt/versions
    ```
    """
    from datetime import UTC, datetime

    from weightsync.cli.tables import show, titled_table
    from weightsync.protocol.round_log import size
    from weightsync.store.catalog import orders

    opened = OpenedStore(store, run, key)
    rows = [_row(opened, order) for order in orders(opened.store, opened.run)]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        if "error" in row:
            return row["version"], "", "", "", "", row["error"]
        when = datetime.fromtimestamp(row["stored"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        kind = "key frame" if row["base"] is None else f"delta on {row['base']}"
        return row["version"], str(row["step"] or ""), when, size(row["written_bytes"]), size(row["needed_bytes"]), kind

    show(
        {"run": opened.run, "key": opened.public_text, "versions": rows},
        lambda _: titled_table(opened.run, ("version", "step", "stored (UTC)", "wrote", "needs", "~kind"), map(cells, rows)),
        as_json=json,
    )


@store_app.command("show", cls=StoreCommand)
def show_version(
    version: _Version = None, store: StoreUrl = None, run: OfRun = None, key: PublicKey = None, json: Json = False
) -> None:
    """Show one version: its digest, and the objects that it needs.

    ```
    weightsync store show 7
    ```
    """
    from weightsync.cli.tables import show, titled_table
    from weightsync.protocol.round_log import size

    opened = OpenedStore(store, run, key)
    stored = opened.load(opened.order(version))
    objects = [(number, item) for number, rank in enumerate(stored.stored.ranks) for item in rank.chain]
    listed = [{"rank": number, "path": item.path, "kind": item.kind, "bytes": item.nbytes} for number, item in objects]
    described = _row(opened, stored.version.order) | {"manifest": stored.version.manifest, "tensors": len(stored.manifest)}
    rows = ((number, item.kind, size(item.nbytes), item.path) for number, item in objects)
    show(
        described | {"object_list": listed},
        lambda _: titled_table(f"{stored.version}, digest {stored.version.digest}", ("rank", "kind", "bytes", "~object"), rows),
        as_json=json,
    )


@store_app.command(cls=StoreCommand)
def verify(
    version: _Version = None,
    store: StoreUrl = None,
    run: OfRun = None,
    key: PublicKey = None,
    timeout: _Timeout = _DAY,
    json: Json = False,
) -> None:
    """Read a version and check all of it: signature, every object's SHA-256, and the digests of the tensors that it makes.

    ```
    weightsync store verify 7 --key "$(cat run.key)"
    ```

    Exits with an error if anything is not what the trainer published.
    """
    from weightsync.deadline import Deadline
    from weightsync.protocol.round_log import size
    from weightsync.store.restore import check_object, tensors_of

    opened, deadline = OpenedStore(store, run, key), Deadline(timeout)
    stored = opened.load(opened.order(version))
    for item in stored.objects.values():
        deadline.remaining("verifying")
        check_object(opened.store, item)
    tensors = sum(len(part) for part in tensors_of(opened.store, stored, deadline))
    nbytes = sum(item.nbytes for item in stored.objects.values())
    _say(
        {"version": str(stored.version), "digest": stored.version.digest, "tensors": tensors, "bytes": nbytes, "ok": True},
        f"version {stored.version} is what was published: {tensors} tensors, {size(nbytes)} in {len(stored.objects)} objects",
        json,
    )


@store_app.command(cls=StoreCommand)
def gc(
    keep: Annotated[int, typer.Option(min=1, help="Newest versions to keep.")],
    store: StoreUrl = None,
    run: OfRun = None,
    key: PublicKey = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Keep objects younger than so many seconds. Use 0 only if nothing writes.")
    ] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove old versions, and objects that no version needs. What a kept version needs stays, however old.

    ```
    weightsync store gc --keep 5 --dry-run
    ```
    """
    from weightsync.model import label_of
    from weightsync.protocol.round_log import size
    from weightsync.store.catalog import collect_garbage

    opened = OpenedStore(store, run, key)
    removed = collect_garbage(opened.store, opened.run, opened.public, keep, grace=grace, dry_run=dry_run)
    labels = [label_of(opened.run, *order) for order in removed.versions]
    verb = "would remove" if dry_run else "removed"
    later = f"; {removed.young} unneeded objects are younger than {grace:g} s: run gc again later" if removed.young else ""
    _say(
        {"versions": labels, "objects": removed.objects, "bytes": removed.nbytes, "young": removed.young, "dry_run": dry_run},
        f"{verb} {len(labels)} versions, and {removed.objects} objects of {size(removed.nbytes)}{later}",
        json,
    )


@store_app.command(cls=StoreCommand)
def export(
    folder: Annotated[Path, typer.Argument(help="Folder for the checkpoint.")],
    version: _Version = None, store: StoreUrl = None, run: OfRun = None, key: PublicKey = None, timeout: _Timeout = _DAY,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a version as a Hugging Face checkpoint: safetensors files and their index. Every tensor is verified first.

    ```
    weightsync store export ./checkpoint 7
    ```

    The model's configuration and tokenizer are not in the store: copy them from the checkpoint that training began with.
    """
    from weightsync.deadline import Deadline
    from weightsync.store.restore import export as write

    if version is None and str(folder).isdecimal():
        raise ConfigurationError(f"give the folder, then the version: weightsync store export ./checkpoint {folder}")
    opened = OpenedStore(store, run, key)
    stored = opened.load(opened.order(version))
    files = [str(path) for path in write(opened.store, stored, folder, Deadline(timeout))]
    _say({"version": str(stored.version), "files": files}, f"wrote version {stored.version} to {folder}: {len(files)} files", json)


@store_app.command("key", cls=StoreCommand)
def show_key(store: StoreUrl = None, run: OfRun = None, json: Json = False) -> None:
    """Print the public key of a run whose coordinator ran here as this user. It is no secret.

    ```
    weightsync store key --run my-run
    ```
    """
    run = run or OpenedStore(store, None, None, _GO_THERE).run
    text = _public_key(run, None, _GO_THERE)[1]
    _say({"run": run, "key": text}, text, json)


def _say(value: dict[str, Any], text: str, as_json: bool) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode() if as_json else text)
