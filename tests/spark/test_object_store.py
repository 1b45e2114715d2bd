"""Settings of checkpoints in S3."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from spark.object_store import ObjectStore, store_settings
from spark.settings import TransformSettings, load_pipes


def settings(**given: object) -> TransformSettings:
    return TransformSettings.model_validate(given)


@pytest.mark.parametrize(
    "place",
    ["s3://bucket/p", "hdfs://host/p", "file:///mnt/p", "s3a:///p", "s3a://key:secret@bucket/p", "s3a://bucket/p?a=b"],
)
def test_a_place_that_keeps_no_promise_is_refused(place: str) -> None:
    """If this fails, two drivers write under one checkpoint in a store that replaces files, or a secret is in a setting."""
    with pytest.raises(ValidationError, match="Try: /var/lib/penstock/checkpoints or s3a://bucket/checkpoints"):
        settings(checkpoints=place)


def test_a_store_is_used_where_checkpoints_or_tables_are_in_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If this fails, the jars for S3 are fetched for nothing, or requests go elsewhere than the operator says."""
    assert settings(s3_endpoint="http://minio:9000").object_store() is None
    given = settings(checkpoints="s3a://bucket/p/", s3_endpoint="http://minio:9000", s3_path_style=True)
    assert given.checkpoint_root() == "s3a://bucket/p"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    assert given.object_store() == ObjectStore("http://minio:9000", "", path_style=True)
    found = store_settings(ObjectStore("http://minio:9000", path_style=True))
    assert found["spark.hadoop.fs.s3a.endpoint"] == "http://minio:9000"
    assert found["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"
    assert found["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert "a secret" not in str(found)
    text = """
version: 1
streams: {s: {}, t: {}}
tables: {names: {parquet: "s3a://bucket/names", columns: "n INT"}}
pipes:
  p: {sources: [s], transform: {sql: SELECT * FROM s}, destinations: [{name: d, stream: t}]}
  q: {sources: [s], transform: {tables: [names], sql: SELECT * FROM s}, destinations: [{name: d, stream: t}]}
"""
    (tmp_path / "pipes.yaml").write_text(text)
    for pipe, store in (("p", None), ("q", ObjectStore())):
        chosen = settings(pipes=tmp_path / "pipes.yaml", only=pipe)
        assert chosen.object_store(load_pipes(chosen)) == store
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert not {name for name in store_settings(ObjectStore()) if name.endswith(("endpoint", "region"))}
