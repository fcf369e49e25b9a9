"""`python -m ejdist`: names the commands' modules."""

print(
    "ejdist has no command of its own: python -m launch lists the commands, python -m kernels what each operation supports."
)
