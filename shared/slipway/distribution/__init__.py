"""The distribution that installs this package: its name and version, and its optional parts."""
