# SPDX-License-Identifier: Apache-2.0
"""`ugds bench safetensors` and `checkpoint`: options and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MakeCommand = Callable[..., argparse.ArgumentParser]


def add_commands(
    command: MakeCommand,
    run: Callable[[argparse.Namespace], int],
    size: Callable[[str], int],
    positive: Callable[[str], int],
    whole: Callable[[str], int],
) -> None:
    weights = command(
        "safetensors",
        run,
        "loading and saving safetensors files, beside the safetensors package (and fastsafetensors, with a GPU)",
        "examples:\n"
        "  ugds bench safetensors\n"
        "  ugds bench safetensors --gpu 0 --size 4GiB --folder /var/tmp --json | grep ratio_to_safetensors\n\n"
        "ratio_to_safetensors is how many times as fast a file in the page cache is loaded; share_of_disk the "
        "throughput of\none that is not, over that of plain reads with O_DIRECT; save_ratio_to_safetensors is saving "
        "to the page cache,\ndurable_save_ratio_to_safetensors to the disk. All are of the same round, and medians. "
        "beyond_tensors_mib is\nthe memory, of GPU and process, that a first load takes at most beside its tensors.",
    )
    checkpoint = command(
        "checkpoint",
        run,
        "saving and loading checkpoints, beside torch.save and torch.load (needs PyTorch)",
        "examples:\n  ugds bench checkpoint\n  ugds bench checkpoint --gpu 0 --size 4GiB --json\n\n"
        "save_ratio_to_torch is how many times as fast as torch.save a checkpoint is saved to the page cache,\n"
        "durable_save_ratio_to_torch to the disk (torch.save and fsync), load_ratio_to_torch how it is loaded.",
    )
    weights.add_argument("--only", choices=("load", "save"), help="a part of it, which takes less time")
    for made in (weights, checkpoint):
        made.add_argument("--size", type=size, default=256 << 20, help="of the file (256MiB)")
        made.add_argument("--folder", metavar="PATH", help="where files are made, and removed again (TMPDIR)")
        made.add_argument("--gpu", type=whole, metavar="N", help="the GPU whose memory is used (the host's)")
        made.add_argument("--rounds", type=positive, default=5, help="figures are medians of them (%(default)s)")
        made.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
