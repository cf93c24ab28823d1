"""Other engines that dynaspec's controllers drive: one package a host."""
