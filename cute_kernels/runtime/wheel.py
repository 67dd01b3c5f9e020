"""A bundle as a wheel, cute-kernels-prebuilt; the cache finds the bundle where the wheel is installed.

Any distribution can do the same: an entry point of the group "cute_kernels.bundles" names a package whose folder is a
bundle.
"""

import base64
import csv
import hashlib
import io
import os
import sysconfig
import zipfile
from pathlib import Path

from . import keys
from .bundle import GROUP, MANIFEST, Bundle

PACKAGE = "cute_kernels_prebuilt"
INIT = '"""Compiled kernels of cute-kernels; the library finds them here."""\n'


def write_wheel(folder: str | os.PathLike[str], out: str | os.PathLike[str], version: str) -> Path:
    """Pack the bundle in `folder` into a wheel in the folder `out`, and return its path.

    The wheel requires the versions that its kernels were compiled with and by.

    Args:
        version: of the library.

    Raises:
        BundleError: `folder` is no bundle, or was made for other sources or versions than those of this process.
    """
    bundle = Bundle(folder)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag, info = f"py3-none-{platform}", f"{PACKAGE}-{version}.dist-info"
    archs = ", ".join(sorted({entry["arch"] for entry in bundle.entries.values()}))
    compiler = [(name, number) for name, number in sorted(keys.versions().items()) if name != "cuda"]
    metadata = [
        ("Metadata-Version", "2.1"),
        ("Name", PACKAGE.replace("_", "-")),
        ("Version", version),
        ("Summary", f"Compiled kernels of cute-kernels for {archs}"),
        *(("Requires-Dist", f"{name}=={number}") for name, number in [("cute-kernels", version), *compiler]),
    ]
    wheel = [("Wheel-Version", "1.0"), ("Generator", "cute-kernels"), ("Root-Is-Purelib", "false"), ("Tag", tag)]
    files = {f"{PACKAGE}/__init__.py": INIT.encode(), f"{PACKAGE}/{MANIFEST}": (bundle.folder / MANIFEST).read_bytes()}
    for key in bundle.entries:
        found = bundle.find(key)
        assert found is not None
        files[f"{PACKAGE}/{found[0].name}"] = found[0].read_bytes()
    files[f"{info}/METADATA"] = _headers(metadata)
    files[f"{info}/WHEEL"] = _headers(wheel)
    files[f"{info}/entry_points.txt"] = f"[{GROUP}]\nprebuilt = {PACKAGE}\n".encode()
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = record.getvalue().encode()
    path = Path(out) / f"{PACKAGE}-{version}-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def _headers(lines: list[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\n" for name, value in lines).encode()
