"""The default target, and the drafts for it that come with the package."""
