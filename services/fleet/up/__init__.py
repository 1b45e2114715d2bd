"""`penstock up`: plans the processes of a fleet on one machine, starts them and supervises them."""
