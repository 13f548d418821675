"""Where a test keeps its checkpoints."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Root:
    """A fresh, empty place for checkpoints: a directory, or a prefix on the S3 server."""

    url: str
    storage_options: dict[str, str] | None = field(default=None, repr=False)

    @property
    def on_s3(self) -> bool:
        return self.url.startswith("s3://")
