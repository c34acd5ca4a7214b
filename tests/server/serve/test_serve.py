"""The life of a server process: start, readiness, signals, failures, exit codes, and what is said about them."""

import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serve_clients import CHAT, body, get, post, raw_stream, rest_of

pytestmark = pytest.mark.e2e


def test_answers_before_it_is_ready(start) -> None:
    """The listener is up while the model loads, and a signal ends the loading at once."""
    process = start(load="slow")
    assert get(process.port, "/health").status_code == 503
    assert post(process.port, 5).status_code == 503
    process.signal()
    assert process.wait(60) == 0
    assert "did not end in time" not in process.output
    assert "Traceback" not in process.output


def test_ready_line_and_exit(start) -> None:
    process = start()
    line = process.says(r"aserve: ready on http://127\.0\.0\.1:(\d+) \(model M\) after [\d.]+ s")
    assert int(line[1]) == process.port
    assert get(process.port, "/ready").status_code == 200
    assert "[DONE]" in post(process.port, 5).text
    process.signal(signal.SIGINT)
    assert process.wait() == 0 and "Traceback" not in process.output


def test_the_start_says_where_the_memory_goes(start) -> None:
    process = start()
    process.says(r"\naserve: ready on .*\nmemory of a GPU +1\.00 GiB  100\.0 %\n  weights +512\.0 MiB   50\.0 %\n")
    table = process.says(r"\nmemory of a GPU(.*\n)+requests of that length in parallel: 1\n")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_running_requests_finish_after_sigterm(start) -> None:
    """Streams that run get all their tokens; what comes meanwhile is refused with 503 and Retry-After."""
    process = start(step_s=0.01)
    process.ready()
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(post, process.port, 150) for _ in range(4)]
        for client in (httpx.Client(http1=False, http2=True, trust_env=False),):
            streams += [pool.submit(lambda c=client: c.post(f"http://127.0.0.1:{process.port}{CHAT}", json=body(150)))]
        time.sleep(0.4)
        process.signal()
        process.says("no new requests")
        late = post(process.port, 5)
        assert late.status_code == 503 and "retry-after" in late.headers
        assert get(process.port, "/ready").status_code == 503
        for stream in streams:
            assert stream.result().text.rstrip().endswith("[DONE]")
            assert stream.result().text.count("chat.completion.chunk") > 100
        client.close()
    assert process.wait() == 0


def test_requests_beyond_the_drain_time_get_an_error(start) -> None:
    process = start(step_s=0.01, server={"drain_timeout_s": 0.3})
    sock = raw_stream(process.ready(), 16000)
    process.signal()
    data = rest_of(sock)
    assert b'"error"' in data and b'"engine_draining"' in data and data.endswith(b"0\r\n\r\n")
    assert process.wait() == 0


def test_answers_on_their_way_get_the_drain_time_too(start) -> None:
    """The engine is done with them, their clients are still reading: slower than the grace after the drain."""
    process = start(step_s=0.0)
    sock = raw_stream(process.ready(), 4000)
    end = time.monotonic() + 20
    while re.search(r"num_requests_running\S* [1-9]", get(process.port, "/metrics").text) and time.monotonic() < end:
        time.sleep(0.05)
    process.signal()
    process.says("no new requests")
    time.sleep(3)
    assert process.alive
    assert b"[DONE]" in rest_of(sock)
    assert process.wait(5) == 0
    assert "closed" not in process.output


def test_whole_answers_beyond_the_drain_time_are_errors(start) -> None:
    process = start(step_s=0.01, server={"drain_timeout_s": 0.3})
    port = process.ready()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            httpx.post, f"http://127.0.0.1:{port}{CHAT}", json=body(16000, stream=False), timeout=20, trust_env=False
        )
        time.sleep(0.5)
        process.signal()
        assert answer.result().status_code == 503
        error = answer.result().json()["error"]
        assert error["code"] == "engine_draining" and "within 0.3 s" in error["message"]
    assert process.wait() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_ends_at_once(start, number: int, code: int) -> None:
    process = start(step_s=0.01)
    sock = raw_stream(process.ready(), 16000)
    process.signal(number)
    process.says("no new requests")
    assert process.alive
    process.signal(number)
    assert process.wait(5) == code
    sock.close()


def test_client_that_does_not_read_does_not_hold_up_the_end(start) -> None:
    """Its socket is full, its request runs; after the drain time it is closed, and the process ends with 0."""
    process = start(step_s=0.0, server={"drain_timeout_s": 0.3})
    sock = raw_stream(process.ready(), 16000)
    time.sleep(1)
    process.signal()
    assert process.wait(60) == 0
    sock.close()


def test_stuck_step_does_not_hold_up_the_end(start) -> None:
    process = start(load="stuck", server={"drain_timeout_s": 0.3, "watchdog_s": 0.3})
    port = process.ready()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, port, 5)
        process.says("no step has completed for 0.3 s")
        assert get(port, "/health").status_code == 503
        process.signal()
        assert process.wait(15) == 0
        assert answer.result().status_code in (200, 503)


def test_failed_engine_ends_the_process(start) -> None:
    """Running and queued requests get an error each, then the process ends with 70 and the cause as its last line."""
    process = start(step_s=0.01, fail_at_step=60)
    port = process.ready()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: post(port, 16000), range(20)))
    assert all("engine_dead" in answer.text for answer in answers)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert process.wait() == 70
    last = process.output.rstrip().splitlines()[-1]
    assert "RuntimeError" in last, process.output


def test_model_that_cannot_be_loaded(start) -> None:
    process = start(load="refused")
    assert process.wait() == 1
    assert process.output.rstrip().splitlines()[-1].startswith("aserve: error: no model is in the folder")
    assert "Traceback" not in process.output


def test_fault_while_loading(start) -> None:
    process = start(load="crash")
    assert process.wait() == 1
    assert process.output.count("ZeroDivisionError: a fault of ours") == 1


def test_port_in_use(start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(server={"port": port})
        assert process.wait() == 1
    assert re.fullmatch(rf"aserve: error: .*127\.0\.0\.1:{port}.*\n", process.output)


def test_two_servers_on_one_port(start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [start(server={"port": port}) for _ in range(2)]
    end = time.monotonic() + 20
    while all(p.alive for p in both) and time.monotonic() < end:
        time.sleep(0.02)
    (winner,) = [p for p in both if p.alive]
    assert winner.ready() == port and get(port, "/health").status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_and_a_log_without_secrets(start, certificate: Path) -> None:
    """HTTPS with HTTP/2; the most talkative log contains neither the key nor the prompt."""
    pair = {"tls_certificate": str(certificate / "cert.pem"), "tls_key": str(certificate / "key.pem")}
    process = start(server=pair | {"api_key": ["secret-key-42"], "log_level": "debug"})
    process.says("ready on https://127.0.0.1")
    with httpx.Client(http2=True, verify=False, trust_env=False) as client:
        headers = {"Authorization": "Bearer secret-key-42"}
        answer = client.post(f"https://127.0.0.1:{process.port}{CHAT}", json=body(5), headers=headers)
    assert answer.http_version == "HTTP/2" and "[DONE]" in answer.text
    process.signal()
    assert process.wait() == 0
    assert "secret-key-42" not in process.output


def test_certificate_that_cannot_be_used(start, certificate: Path) -> None:
    key = str(certificate / "key.pem")
    process = start(server={"tls_certificate": key, "tls_key": key})
    assert process.wait() == 1
    assert re.fullmatch(r"aserve: error: cannot use the TLS certificate.*\n", process.output)
