"""The peers that featstore is measured against, one module each; none of them uses featstore."""
