"""Files that must be refused: damaged files, and files of other kinds.

Each table maps the name of a fault to the file's bytes and to a part of the error message.
"""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import torch

from tests.helpers import torch_files as files
from tests.helpers.bad_pickles import SYSTEM
from tests.helpers.torch_files import STORAGES, archive, whole

MODEL = {"w": torch.zeros(3)}


def flipped(raw, position, bit):
    changed = bytearray(raw)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damaged():
    """Makes 70 files that are cut short, and 100 files with one flipped bit in the data."""
    random = np.random.RandomState(0)
    good = files.saved(files.documented())
    found = {f"cut at {k}": good[:k] for k in random.randint(1, len(good) - 1, 70)}
    positions = []
    with zipfile.ZipFile(io.BytesIO(good)) as file:
        for info in file.infolist():
            if "/data" in info.filename:
                raw = file.read(info)
                start = good.index(raw, info.header_offset)
                positions += range(start, start + len(raw))
    for index, position in enumerate(random.choice(positions, 100, replace=False)):
        found[f"bit flip at {position}"] = flipped(good, int(position), index % 8)
    return {name: (raw, "xpected") for name, raw in found.items()}


WORDS = torch.zeros(624, dtype=torch.int64)
WRONG_GENERATORS = {  # fault -> the changed field in the format of save_checkpoint
    "a position behind the last word": {"pos": 5_000},
    "a position one behind the last": {"pos": 625},
    "a negative position": {"pos": -1},
    "a position of 2**70": {"pos": 2**70},
    "a position in text": {"pos": "x"},
    "a position that is no count": {"pos": 3.5},
    "a position in a tensor": {"pos": torch.tensor([3])},
    "two words": {"key": WORDS[:2]},
    "words in a list": {"key": [0] * 624},
    "words that are no numbers": {"key": WORDS.float()},
    "two samples kept back": {"has_gauss": 2},
    "a sample in text": {"cached_gaussian": "x"},
}


class GeneratorAt:
    """Is pickled as a NumPy generator at a position, which NumPy itself refuses from 2.5 on."""

    def __init__(self, position):
        self.position = position

    def __reduce__(self):
        make, arguments, state = np.random.RandomState(0).__reduce__()
        state["state"] = {"key": WORDS.numpy(), "pos": self.position}
        return make, arguments, state


def _generators():
    """Makes impossible states of a NumPy generator, in our format and in NumPy's pickles."""
    lacking = {"key": WORDS, "pos": 3, "has_gauss": 0}
    good = lacking | {"cached_gaussian": 0.0}
    found = {
        "a generator of a number": (_with_generator(5), "`rng` must hold"),
        "a generator that lacks a field": (_with_generator(lacking), "`rng` must hold"),
    }
    for name, change in WRONG_GENERATORS.items():
        found[name] = (_with_generator(good | change), "`rng` must h")
    for position in (-1, 625, 5_000):
        state = files.slots(rng=GeneratorAt(position))
        found[f"NumPy's generator at {position}"] = (state, "`rng` must have a position")
    return found


def _with_generator(rng):
    return files.own_format(powersgd=files.slots(iter=3) | {"rng": rng})


def foreign():
    """Makes files of other kinds, and torch files that are not a checkpoint."""
    npz = io.BytesIO()
    tar = io.BytesIO()
    other = io.BytesIO()
    np.savez(npz, a=np.zeros(3))
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("readme.txt", "hello")
    without_q = files.slots()
    del without_q["q_memory_dict"]
    old = files.saved(files.documented(), _use_new_zipfile_serialization=False)
    empty = archive(whole(b"}"))
    big = archive(files.pickle_of_tensor(), {"byteorder": b"big", **STORAGES})
    own = files.own_format
    documents = {
        "a number": (3, "a int"),
        "text": ("state_dict", "a str"),
        "numbers": ({"epoch": 3, "loss": 0.5}, "no state_dict"),
        "a hook state that is none": ({"w": MODEL, "comm_hook_state": [3]}, "not a PowerSGDState"),
        "a hook state without Q": ({"comm_hook_state": without_q}, "not a PowerSGDState"),
        "text for iter": (files.slots(iter="twelve"), "`iter`"),
        "rank zero": (files.slots(matrix_approximation_rank=0), "rank"),
        "errors of numbers": (files.slots(error_dict={0: 1.5}), "error_dict"),
        "an error that is expanded": (
            files.slots(error_dict={0: torch.zeros(1).expand(1 << 20)}), "flat tensors",
        ),
        "an error of integers": (
            files.slots(error_dict={0: torch.zeros(3, dtype=torch.int64)}), "floating-point",
        ),
        "2**40 iterations": (files.slots(iter=2**40), "`iter`"),
        "True iterations": (files.slots(iter=True), "`iter` must be of type int"),
        "a rate of 10**400": (files.slots(min_compression_rate=10**400), "min_compression_rate"),
        "a rate below 0": (files.slots(min_compression_rate=-1.0), "_rate` must be >= 0"),
        "a rate that is none": (files.slots(min_compression_rate=np.nan), "min_compression_rate"),
        "a version in a list": (own(version=[1]), "format version a list"),
        "a later version": (own(version=2), "format version 2,"),
        "an optimizer of a number": (own(optimizer=5), "optimizer"),
        "no rank": (own(errors=[]), "`errors`"),
        "ranks of other buckets": (own(errors=[{0: torch.zeros(3)}, {}]), "different buckets"),
        "ranks of other sizes": (
            own(errors=[{0: torch.zeros(3)}, {0: torch.zeros(4)}]), "different sizes",
        ),
        "20 000 ranks": (own(errors=[{0: torch.zeros(3)}] * 20_000), "`errors`"),
        "keys that are equal as text": ({"state_dict": MODEL, 1: 2, "1": 3}, "equal as text"),
        "names that are equal as text": (
            {"state_dict": {1: torch.ones(2), "1": torch.zeros(2)}}, "equal as text",
        ),
        "a big-endian array": ({"state_dict": MODEL, "a": np.ones(2, ">f4")}, "big-endian"),
        "keys that are no text": ({"state_dict": MODEL, None: 2}, "not text"),
        "20 000 numbers as keys": (
            {"state_dict": MODEL, "seen": {3 * k + 1: 0 for k in range(20_000)}}, "str(key)",
        ),
    }  # fmt: skip
    documents.update(_generators())
    found = {name: (files.saved(value), said) for name, (value, said) in documents.items()}
    kinds = {
        "empty": (b"", "empty"),
        "one byte": (b"\x80", "torch.save"),
        "a sentence": (b"hello, this is no checkpoint\n", "not a zip archive"),
        "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        "gzip": (gzip.compress(files.saved(MODEL), mtime=0), "gunzip"),
        "tar": (tar.getvalue(), "a tar archive"),
        "npz": (npz.getvalue(), "data.pkl"),
        "safetensors": (struct.pack("<Q", 20) + b'{"w":{"dtype":"F32"}}', "safetensors"),
        "torchscript": (archive(whole(b"}"), {"constants.pkl": b"x"}), "TorchScript"),
        "another zip": (other.getvalue(), "data.pkl"),
        "the end of a zip": (b"PK\x05\x06" + bytes(18), "data.pkl"),
        "the start of a zip": (b"PK\x03\x04" + bytes(40), "damaged"),
        "a pickle": (pickle.dumps({"state_dict": {}}, 4), "as torch wrote before 1.6"),
        "a call in a pickle": (whole(SYSTEM), "as torch wrote before 1.6"),
        "torch before 1.6": (old, "weights_only=True"),
        "protocol 99": (archive(b"\x80\x63."), "protocol"),
        "no storages": (archive(files.pickle_of_tensor()), "data/0"),
        "big-endian": (big, "big-endian"),
        "encrypted": (flipped(empty, empty.index(b"PK\x01\x02") + 8, 0), "data.pkl"),
        "another name in the local header": (
            empty.replace(b"data.pkl", b"data.txt", 1), "data.pkl",
        ),
        "BZIP2": (archive(files.pickle_of_tensor(), STORAGES, zipfile.ZIP_BZIP2), "compression"),
    }  # fmt: skip
    return found | kinds
