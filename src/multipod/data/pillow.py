"""Pillow's modules, each imported when something of it is first used: recipes of images are read without Pillow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multipod.extras import import_optional

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageEnhance, ImageOps
else:

    @dataclass(frozen=True)
    class _Deferred:
        """A module of Pillow; its first use raises `MissingPackageError` where Pillow is not installed."""

        module: str

        def __getattr__(self, name: str) -> Any:
            return getattr(import_optional("images", self.module), name)

    Image, ImageDraw = _Deferred("PIL.Image"), _Deferred("PIL.ImageDraw")
    ImageEnhance, ImageOps = _Deferred("PIL.ImageEnhance"), _Deferred("PIL.ImageOps")

__all__ = ["Image", "ImageDraw", "ImageEnhance", "ImageOps"]
