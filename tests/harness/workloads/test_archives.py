"""Promise: an archive is unpacked into its folder and nowhere else, on every Python that is supported."""

import io
import tarfile

import pytest

from harness.workloads.sources.folders import unpack


@pytest.fixture(params=["filters", "none, as before Python 3.11.4"])
def _python(request, monkeypatch):
    if request.param != "filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def archive(*members: tuple[str, bytes]) -> tarfile.TarFile:
    """Files by name; a name alone is a link of that name to /etc/passwd."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content), tarfile.REGTYPE if content else tarfile.SYMTYPE
            info.linkname = "" if content else "/etc/passwd"
            tar.addfile(info, io.BytesIO(content))
    packed.seek(0)
    return tarfile.open(fileobj=packed)


@pytest.mark.usefixtures("_python")
def test_files_lie_where_the_archive_says(tmp_path):
    unpack(archive(("./a/b/one.txt", b"1"), ("two.txt", b"2")), tmp_path)
    found = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"a/b/one.txt": b"1", "two.txt": b"2"}


@pytest.mark.usefixtures("_python")
@pytest.mark.parametrize("member", [("../outside", b"x"), ("a/../../outside", b"x"), ("link", b"")])
def test_nothing_is_written_outside(tmp_path, member):
    folder = tmp_path / "inside"
    folder.mkdir()
    with pytest.raises(tarfile.TarError, match=member[0]):
        unpack(archive(member), folder)
    assert [path for path in tmp_path.rglob("*") if path != folder] == []
