"""TLS: the protocol by ALPN, clients with certificates, certificates that change, handshakes that do not come."""

import logging
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import trio
from guard_client import H2Peer, Peer, client_tls, make_certificate, serving

from aserve.server.guard.tls import tls_context

pytestmark = pytest.mark.anyio


def settings(pair: tuple[Path, Path], **more) -> dict:
    return {"certfile": str(pair[0]), "keyfile": str(pair[1]), **more}


@pytest.mark.parametrize("protocol", ["h2", "http/1.1", None])
async def test_alpn(protocol: str | None, certificate: tuple[Path, Path]) -> None:
    """ALPN picks the protocol, HTTP/1.1 is for clients that do not ask; a large answer arrives whole."""
    context = client_tls(certificate[0], *([protocol] if protocol else []))
    async with serving(**settings(certificate)) as running:
        plain = await trio.open_tcp_stream("127.0.0.1", running.port)
        stream = trio.SSLStream(plain, context, https_compatible=True)
        await stream.do_handshake()
        assert stream.selected_alpn_protocol() == protocol
        peer = (H2Peer if protocol == "h2" else Peer)(stream, plain)
        await peer.start()
        if isinstance(peer, H2Peer):
            number = await peer.request("/stuck?kib=512")
            assert await peer.over(number) and len(peer.streams[number].data) == 512 * 1024
        else:
            await peer.get("/stuck?kib=512")
            assert await peer.until(b"0\r\n\r\n") and peer.data.count(b"f" * 4096) == 128
        await plain.aclose()
        assert await running.unconnected()


async def test_weak_ciphers_are_refused(certificate: tuple[Path, Path]) -> None:
    old = client_tls(certificate[0])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.set_ciphers("AES256-SHA")  # no forward secrecy, and on the list of RFC 9113, appendix A
    async with serving(tls=old, **settings(certificate)) as running:
        with pytest.raises(OSError):  # noqa: PT011 the handshake's failure is one
            await Peer.connect(running.port)


async def test_handshake_that_never_comes(certificate: tuple[Path, Path]) -> None:
    async with serving(**settings(certificate), ssl_handshake_timeout=0.3) as running:
        Peer.tls.pop(running.port)
        silent, plain = await Peer.connect(running.port), await Peer.connect(running.port)
        await plain.get("/ok")
        assert await silent.closed(20) and await plain.closed(20) and b"200" not in plain.data


async def answers(port: int) -> bool:
    """Whether a request is answered; in TLS 1.3 a client learns that it is refused only when it reads."""
    try:
        peer = await Peer.connect(port)
    except OSError:
        return False
    await peer.get("/ok", "Connection: close")
    await peer.closed()
    return peer.status == 200


async def test_clients_need_a_certificate(certificate: tuple[Path, Path], tmp_path: Path, caplog) -> None:
    """With client authorities, a client without a certificate, or with a stranger's, is not served."""
    known, stranger = make_certificate(tmp_path, "known"), make_certificate(tmp_path, "stranger")
    async with serving(**settings(certificate, client_ca=str(known[0]))) as running:
        for pair, served in ((None, False), (stranger, False), (known, True)):
            context = Peer.tls[running.port] = client_tls(certificate[0])
            if pair is not None:
                context.load_cert_chain(*pair)
            assert await answers(running.port) is served
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_certificate_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections use the new pair, old ones go on; a pair that cannot be used changes nothing but the log."""
    caplog.set_level(logging.INFO, "aserve")
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    for source, target in zip(first, pair, strict=True):
        shutil.copy(source, target)
    async with serving(tls=client_tls(first[0]), **settings(pair), keep_alive_timeout=9) as running:
        old = await H2Peer.connect(running.port)
        stream = await old.request("/raw?n=1000&ms=1")
        for source, target in zip(second, pair, strict=True):
            shutil.copy(source, target)
        running.server.reload_tls()
        assert not await answers(running.port)  # it trusts the first only
        Peer.tls[running.port] = client_tls(second[0])
        assert await answers(running.port)
        for broken in ("", "no certificate", second[0].read_text()[:200]):
            caplog.clear()
            pair[0].write_text(broken)
            running.server.reload_tls()
            assert [r.levelno for r in caplog.records] == [logging.ERROR]
            assert "the old ones stay" in caplog.text
            assert await answers(running.port)
        caplog.clear()
        shutil.copy(first[0], pair[0])  # with the second's key
        running.server.reload_tls()
        assert await answers(running.port) and len(caplog.records) == 1
        assert not old.streams[stream].over
        await old.cancel(stream)


def test_encrypted_key_does_not_ask_on_the_terminal(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    key = tmp_path / "locked.pem"
    command = f"openssl ec -in {certificate[1]} -out {key} -aes128 -passout pass:secret"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(OSError, match="encrypted"):
        tls_context(str(certificate[0]), str(key))
