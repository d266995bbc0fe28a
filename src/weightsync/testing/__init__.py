"""Contract suites that a transport or an engine adapter of a third party inherits (extra ``testing``)."""
