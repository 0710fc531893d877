"""The public paths of extras/modules."""
