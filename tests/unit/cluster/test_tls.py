"""Certificates are read again when their files change, and only then; what cannot be used leaves the old ones."""

import logging
from pathlib import Path

import pytest

from cluster.config import load_config
from cluster.core.access import InternalTlsSettings, PublicTlsSettings
from cluster.core.errors import ConfigError
from cluster.tls import CertificateFiles, named_tls, public_files
from tests.certificates import Authority, Files, files

ONE, OTHER = Authority(), Authority()


@pytest.fixture
def first(tmp_path: Path) -> Files:
    return files(tmp_path / "tls", ONE, "headrace")


def opened(made: Files) -> CertificateFiles:
    return CertificateFiles(made.cert, made.key, made.ca)


def test_unchanged_files_are_read_once(first: Files) -> None:
    certificates = opened(first)
    assert certificates.current() is certificates.current()
    assert certificates.current().chain == Path(first.cert).read_bytes()


def test_new_files_count_from_the_next_look_on(first: Files) -> None:
    certificates = opened(first)
    before = certificates.current()
    files(first.folder, OTHER, "headrace")
    after = certificates.current()
    assert after.chain != before.chain
    assert after.ca == OTHER.pem


@pytest.mark.parametrize("broken", ["gone", "empty", "another key", "no PEM", "no CA"])
def test_what_cannot_be_used_leaves_the_old_ones_and_is_said_once(
    first: Files, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    caplog.set_level(logging.ERROR)
    certificates = opened(first)
    before = certificates.current()
    chain, key = ONE.issue("headrace")
    match broken:
        case "gone":
            Path(first.key).unlink()
        case "empty":
            Path(first.cert).write_bytes(b"")
        case "another key":
            Path(first.key).write_bytes(key)
        case "no PEM":
            Path(first.cert).write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
        case "no CA":
            Path(first.ca).write_bytes(b"nobody")
    assert certificates.current() is before
    said = len(caplog.records)
    assert said == 1
    assert certificates.current() is before
    assert len(caplog.records) == said
    first.write(chain, key, OTHER.pem)
    assert certificates.current().key == key
    assert key.decode()[100:150] not in caplog.text


def test_a_start_without_usable_files_is_refused_by_name(first: Files) -> None:
    Path(first.cert).unlink()
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        opened(first)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(first: Files) -> None:
    encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIFHDBOBgkqhkiG9w0BBQ0w\n-----END ENCRYPTED PRIVATE KEY-----\n"
    Path(first.key).write_text(encrypted)
    with pytest.raises(ConfigError, match=r"tls\.key"):
        opened(first)


def test_what_is_configured(first: Files) -> None:
    assert named_tls(InternalTlsSettings()) is None
    assert public_files(PublicTlsSettings()) is None
    mutual = named_tls(InternalTlsSettings(cert_file=first.cert, key_file=first.key, ca_file=first.ca))
    assert mutual is not None
    assert (mutual.name, mutual.files.wants_clients) == ("headrace", True)
    one_sided = public_files(PublicTlsSettings(cert_file=first.cert, key_file=first.key))
    assert one_sided is not None
    assert not one_sided.wants_clients


@pytest.mark.parametrize(
    "settings",
    [
        ["tls.public.cert_file=a"],
        ["tls.public.key_file=a"],
        ["tls.public.client_ca_file=a"],
        ["tls.internal.cert_file=a", "tls.internal.key_file=b"],
        ["tls.internal.ca_file=a"],
    ],
)
def test_halves_are_refused(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"tls\.(public|internal)"):
        load_config(None, settings)
