"""The owner's end: one set of weights, staged once, offered over the transports that its receivers use.

    trainer.weights() --type conversion--> shared memory --> Manifest
                                            |  compared with the version before, where that can pay
                                            +--> file: the whole, or what changed
                                            +--> broadcast, tcp: whichever of them a receiver can use

The staged copy has the receivers' type, stays from one version to the next, and is what the next version is compared with. So training
goes on as soon as it is written, and a receiver that comes late or comes back takes the current version from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, final

import msgspec

from m2flow.channels.keys import Keys
from m2flow.channels.weights.broadcast import BroadcastServer, Offer
from m2flow.channels.weights.buckets import BUCKET_BYTES
from m2flow.channels.weights.delta import Changes
from m2flow.channels.weights.files import WeightFiles
from m2flow.channels.weights.manifest import Content, Manifest
from m2flow.channels.weights.shared import SharedWeights
from m2flow.channels.weights.streams import StreamServer
from m2flow.channels.weights.tensors import Tied, Weight

Transport = Literal["same process", "shared memory", "broadcast", "tcp", "file"]
_MOST_SKIPPED = 16


@dataclass(frozen=True)
class WeightOptions:
    """How weights are handed over. Time only."""

    transports: tuple[str, ...] = ("shared memory",)
    """Those that some receiver uses."""
    directory: str = ""
    """Of `file`."""
    host: str = "127.0.0.1"
    """Of `broadcast` and `tcp`: the address to listen at."""
    keys: Keys | None = None
    """Of `tcp`: the cluster's. Without, it listens at loopback alone."""
    device: str = "cpu"
    """Of `broadcast`: a GPU's name for NCCL."""
    num_receivers: int = 1
    changes: Literal["auto", "never", "always"] = "auto"
    """Send what changed since the version before, where that takes less time; or never; or wherever it can be had."""
    bucket_bytes: int = BUCKET_BYTES


@dataclass
class Published:
    """What the last publication came to."""

    num_bytes: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by transport, as far as they are known here."""
    share_changed: float = -1.0
    """Of all values; -1: not looked at, or not to the end."""
    why: str = ""


@final
class Publisher:
    """Hands out one role's weights. The name starts with the prefix that `remove_segments` and `remove_files` are given. One thread."""

    def __init__(self, name: str, options: WeightOptions) -> None:
        self._options = options
        self._shared = SharedWeights(name)
        self._files = WeightFiles(options.directory, name) if "file" in options.transports else None
        self._server: BroadcastServer | None = None
        self._address = ""
        self._streams: StreamServer | None = None
        self._stream = ""
        self._name = name
        self._version = -1
        self._num_bytes = 0
        self._file_bytes_per_s = 0.0
        self._num_to_skip = 0
        self._num_skipped_last = 0
        self.last = Published()

    def publish(self, tensors: Iterable[tuple[str, Weight | Tied]], version: int) -> Manifest:
        """Take a version in, and offer it.

        Raises:
            ChannelError: a tensor does not travel, or there is no room for it.
        """
        if self._server is not None:
            self._server.withdraw()
        if self._streams is not None:
            self._streams.withdraw()
        changes = self._changes()
        base, self._version = self._version, -1
        start = time.monotonic()
        manifest = self._shared.write(tensors, version=version, changes=changes)
        took_s = time.monotonic() - start
        self._version, self._num_bytes = version, manifest.num_bytes
        body = self._shared.body(manifest.num_bytes)
        self.last = Published(manifest.num_bytes, {"shared memory": manifest.num_bytes})
        found = None
        if changes is not None:
            result = changes.result()
            if result is None:
                self.last.why = "whole: too much changed, or there is nothing to compare with"
                self._num_skipped_last = min(2 * self._num_skipped_last + 1, _MOST_SKIPPED)
                self._num_to_skip = self._num_skipped_last
            else:
                self._num_skipped_last = 0
                self.last.share_changed = changes.num_changed / max(changes.num_values, 1)
                found = (Content(version, base, len(result[1]), manifest.tensors, manifest.tied, result[0]), result[1])
        if self._files is not None:
            self._to_file(manifest.whole(), body, found, took_s)
            manifest = msgspec.structs.replace(manifest, files=self._files.chain)
        if "broadcast" in self._options.transports:
            speed = self._server.bytes_per_s if self._server is not None else 0.0
            pays = found is not None and self._pays(len(found[1]), manifest.num_bytes, speed, took_s)
            self._serving().offer(Offer((manifest.whole(), body), found if pays else None))
            manifest = msgspec.structs.replace(manifest, address=self._address)
            self.last.sent["broadcast"] = len(found[1]) if pays and found is not None else manifest.num_bytes
        if "tcp" in self._options.transports:
            streams = self._streaming()
            pays = found is not None and self._pays(len(found[1]), manifest.num_bytes, streams.bytes_per_s, took_s)
            streams.offer(Offer((manifest.whole(), body), found if pays else None))
            manifest = msgspec.structs.replace(manifest, stream=self._stream)
            self.last.sent["tcp"] = len(found[1]) if pays and found is not None else manifest.num_bytes
        return manifest

    def close(self) -> None:
        """Take everything back. May be called twice."""
        if self._server is not None:
            self._server.close()
        if self._streams is not None:
            self._streams.close()
        if self._files is not None:
            self._files.close()
        self._shared.close()

    def _changes(self) -> Changes | None:
        """What to compare with the version before, if that can be of use."""
        can = set(self._options.transports) & {"file", "broadcast", "tcp"} and self._version >= 0
        if not can or self._options.changes == "never":
            return None
        if self._options.changes == "always":
            return Changes(float("inf"), hopeless=1.0)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        return Changes(self._num_bytes / 2)

    def _to_file(self, whole: Content, body: object, found: tuple[Content, object] | None, took_s: float) -> None:
        assert self._files is not None
        if found is not None:
            content, new = found
            size = content.num_bytes
            pays = self._pays(size, whole.num_bytes, self._file_bytes_per_s, took_s)
            if pays and self._files.takes(size, whole.num_bytes):
                self._files.write(content, new)  # type: ignore[arg-type]
                self.last.sent["file"] = size
                return
        start = time.monotonic()
        self._files.write(whole, body)  # type: ignore[arg-type]
        self._file_bytes_per_s = whole.num_bytes / max(time.monotonic() - start, 1e-9)
        self.last.sent["file"] = whole.num_bytes

    def _pays(self, num_bytes: int, whole_bytes: int, bytes_per_s: float, took_s: float) -> bool:
        if self._options.changes == "always":
            self.last.why = "changes: asked for"
            return True
        is_worth_it, self.last.why = pays(num_bytes, whole_bytes, bytes_per_s, took_s)
        return is_worth_it

    def _serving(self) -> BroadcastServer:
        if self._server is None:
            self._server = BroadcastServer(
                host=self._options.host,
                device=self._options.device,
                num_expected=self._options.num_receivers,
                bucket_bytes=self._options.bucket_bytes,
            )
            self._address = self._server.open()
        return self._server

    def _streaming(self) -> StreamServer:
        if self._streams is None:
            self._streams = StreamServer(host=self._options.host, keys=self._options.keys)
            self._stream = self._streams.open()
        return self._streams


def pays(num_bytes: int, whole_bytes: int, bytes_per_s: float, apply_s: float) -> tuple[bool, str]:
    """Whether to send what changed in place of the whole, and why.

    Args:
        bytes_per_s: what the transport had last; 0: not known yet.
        apply_s: what applying it takes a receiver: about what comparing took here.

    >>> pays(10_000_000, 1_000_000_000, 1e8, 0.2)[0], pays(10_000_000, 1_000_000_000, 1e10, 0.2)[0]
    (True, False)
    """
    if not bytes_per_s:
        is_worth_it = num_bytes < whole_bytes / 2
        return is_worth_it, f"{_kind(is_worth_it)}: {num_bytes:,} of {whole_bytes:,} bytes changed, speed not known yet"
    small_s, whole_s = num_bytes / bytes_per_s + apply_s, whole_bytes / bytes_per_s
    return small_s < whole_s, (
        f"{_kind(small_s < whole_s)}: {small_s:.3f} s with {num_bytes:,} bytes and applying them, "
        f"{whole_s:.3f} s with {whole_bytes:,} bytes, at {bytes_per_s / 1e9:.2f} GB/s"
    )


def _kind(is_worth_it: bool) -> str:
    return "changes" if is_worth_it else "whole"
