"""The reference documentation: pages made from contracts, signatures and READMEs, built with Sphinx."""
