"""A store on disk: files, manifest, generations, small arrays; opened, verified, committed."""
