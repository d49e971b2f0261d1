"""What `paramserver doctor` finds out: this machine, the choices for a config, and the links between hosts."""
