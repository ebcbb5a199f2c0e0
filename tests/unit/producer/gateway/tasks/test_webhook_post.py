import hashlib

from batchery_producer.gateway.callers import hash_key
from batchery_producer.gateway.tasks.webhook_post import derive_secret, signature


def test_signature_is_the_hmac_that_openssl_computes() -> None:
    # printf ID.TIME.BODY | openssl dgst -sha256 -hmac SECRET -binary | base64
    wanted = "v1,MD1MPdHgvT7t00HqI0smnVTsEOlI81T0Q/7zk48bmFY="
    secret = b"32 bytes that are a digest, too.."
    assert signature(secret, "a-task", 1790000000, b'{"number": 7}') == wanted


def test_secret_is_the_digest_of_the_key() -> None:
    assert derive_secret(hash_key("sk-batchery-a")) == hashlib.sha256(b"sk-batchery-a").digest()
