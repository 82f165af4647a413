"""The one name that a wheel of Dormouse owns in site-packages; everything else lies under `_private/`."""

__version__ = "0.1.0"
