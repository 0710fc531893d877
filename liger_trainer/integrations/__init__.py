"""The public paths of extras/integrations."""
