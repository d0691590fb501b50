// A saved page: nothing is behind it.
import { mount } from "./document.js";

mount();
